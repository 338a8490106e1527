"""Faults planted in the code of proofs: which of them do the tests about it not see?"""
