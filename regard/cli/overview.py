"""What `regard --help` says of all commands; it needs nothing but Python."""

from __future__ import annotations

HELP = """The mathematics of attention as working software.

\b
  regard audit                          audit a small real model (extra: demo)
  regard audit ./my-model               audit a model you have, on included sentences
  regard audit ./step-1000 ./step-2000  how each head moved over training
  regard compare old-report new-report  what changed between two audits
  regard checks                         what an audit can ask
  regard decide                         could a typo change this answer? every one is run
  regard cheaper ./my-model --text-file f.txt  which cheaper attention would do, layer by layer
  regard flow                           tokens under a layer that is repeated, as an animation
  regard flow --beta 4 --particles 300  particles that attend to each other, as an animation
  regard train --data my.txt            a small language model, its heads watched while it learns
  regard generate training              what it writes
  regard cost ./my-model --tokens 4096  flops, bytes and parameters, part by part

Each command explains itself: regard audit --help. An error that regard did not foresee has exit status 3 and
names a log with the traceback.
"""


def plain_help() -> str:
    """The same for somebody who has not installed what the commands need."""
    return (
        HELP.replace("\b\n", "")
        + """
The commands need packages that are not installed here:
  pip install 'regard[cli]'     for cost, flow, train and generate
  pip install 'regard[audit]'   for all of them
"""
    )
