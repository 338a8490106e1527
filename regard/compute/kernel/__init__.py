"""How blocks of attention are computed and differentiated, on tensors alone, without problems and engines.

aten: torch's fused kernel as it is. call: how tensors are laid out for it. flash: the kernel as a
differentiable function. products: its derivatives in closed form. tiles: how pairs are cut into blocks.
sweep: functions summed over blocks, with derivatives of every order. blocks: any potential and any
normalizer, block by block.
"""
