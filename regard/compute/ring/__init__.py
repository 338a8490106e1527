"""Attention over several processes: keys travel, queries stay.

line: what ranks tell each other beside the data, and how one notices that another is gone. connecting: how a
line is laid. places: which tokens of a sequence a rank holds. travel: tensors that go round. pieces: own
queries against the keys of one rank. turns: one round forward, one backward. plan: all of it as a plan.
"""
