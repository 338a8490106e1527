"""The site: what `make docs` adds to docs/*.md, and what it checks before it is done."""
