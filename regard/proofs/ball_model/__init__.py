"""The ball model: a whole network near one input, with remainders that keep their directions
(docs/ball-model.md).
"""
