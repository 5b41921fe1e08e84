"""The mistake of resuming without what a recurrent policy carried out of the step before."""

from lockstep.torch_engine import session

_carried = session.carried


def carried(state):
    arrays = _carried(state)
    return {name: array.copy() for name, array in arrays.items()}  # loaded into copies, so lost


session.carried = carried
