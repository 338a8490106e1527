"""Gauss transforms by Fourier series, and what is proved of them.

series: the series and the error of cutting it off. transforms: a way to take its sums; separable and
nonuniform are two. sums: sums with derivatives of every order. form: scores as Gaussians. facts: what is read
from the data before a run. plan: the sums as a plan, with a bound for each row. rowwise: the plan that is
offered unasked, in which every row is as accurate as its dtype.
"""
