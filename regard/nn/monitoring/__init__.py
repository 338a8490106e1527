"""What a monitor reads of each head, the rule by which it warns, and how it prints."""
