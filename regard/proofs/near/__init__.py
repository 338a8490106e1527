"""Bounds near a real input: facts at a sequence (heads), how rows move (moves, linear, token, ball),
and through networks (taylor).
"""
