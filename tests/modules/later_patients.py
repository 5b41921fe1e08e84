"""More training scripts for the doctor, one a function: ``later_patients.py NAME`` a rank."""

import torch
from patients import Agent, Data, join, run
from torch.nn.parallel import DistributedDataParallel


def evaluated_by_turns(unreduced_from=None):
    """Rank 0 evaluates before its fourth step, rank 1 before its fifth, and again five steps later."""
    rank = join()
    agent, data = DistributedDataParallel(Agent()), Data(rank)
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    for step in range(10):
        if step % 5 == 3 + rank:
            with torch.no_grad():
                agent.module(data.batch())
        optimizer.zero_grad()
        if unreduced_from is None or step < unreduced_from:
            agent(data.batch()).mean().backward()
        else:
            agent.module(data.batch()).mean().backward()
        optimizer.step()


def evaluated_by_turns_and_unreduced():
    evaluated_by_turns(unreduced_from=6)


if __name__ == "__main__":
    run(globals())
