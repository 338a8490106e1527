"""A ledger of proofs: what each function of a proof returns while tests run.

A bound that is three times too large hides a fault that makes it two times smaller: attacks do not see it.
The ledger does. It holds, for some tests (`ledger.json`), one number for each function of a proof that the
test reaches: the sizes of all that it returned, once as tests run it, and once with roundings taken to be
two billion times as large as they are, where what is accounted for rounding has a size. Tests of the ledger
fail where a number is another one.

That is no error by itself. `python -m tests.ledger` runs these tests again, says which functions return
something else, and by how much, and writes the new numbers. Read what it says: a certificate may change
where it was wrong, where it becomes smaller, or by its rounding.

    python -m tests.ledger                          every test of the ledger
    python -m tests.ledger tests/near/test_head.py  those of some files
    python -m tests.ledger --add tests/near/test_x.py   tests of a new file, for what few tests reach
    python -m tests.ledger --choose                 choose the tests anew (ten minutes)
"""
