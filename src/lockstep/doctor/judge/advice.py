"""Holds the texts of causes and fixes for what the doctor finds."""

from __future__ import annotations

ATTACH = "lockstep.attach(model, optimizer) reduces gradients whichever method computed the loss"
BARE = "one line: lockstep.attach(agent.module, optimizer), where agent is what DDP returned"
SB3 = "from lockstep.integrations.sb3 import PPO instead of Stable-Baselines3's own"

CAUSES = {
    "independent": "the script never joins a process group, so every rank trains an agent of its own",
    "bypassed": (
        "the loss is computed by methods of the wrapped module (ddp.module.…), and DDP reduces only gradients"
        " of what went through its own forward"
    ),
    "bypassed_sb3": (
        "Stable-Baselines3 computes its loss by policy.evaluate_actions, and DDP reduces only gradients of "
        "what went through its own forward"
    ),
    "partly_reduced": (
        "these tensors aren't in the module that DDP wraps, or their part of the loss didn't go through DDP's"
        " forward, or the last forward pass before the step was made within no_sync()"
    ),
    "outside_ddp": "these tensors belong to a module that was never given to DDP, though another one was",
    "outside_fsdp": (
        "these tensors are in no module that was given to FSDP (fully_shard), which reduces only gradients of what it"
        " shards"
    ),
    "skipped": (
        "other gradients are reduced before the step, and the code that does it leaves these tensors out (a list of"
        " parameters that was made too early, a condition, a name)"
    ),
    "required": "requires_grad differs between ranks for these parameters: one rank trains what another doesn't",
    "unreduced": (
        "there is neither DDP nor FSDP in the process, and no reduction of the script's own reaches the step: there is"
        " none, its result isn't written to p.grad (a copy was reduced) or isn't waited for (async_op=True), or each"
        " rank changes its own gradients after it (clipping by a norm that isn't the same on every rank)"
    ),
    "unreduced_sb3": "Stable-Baselines3's own classes know nothing of ranks, and nothing reduces their gradients",
    "sometimes": "something reduces them before some steps and not before others: a condition, a count of its own",
    "rounding": (
        "each rank rounds in its own way: kernels that aren't deterministic, or an average that each rank "
        "computes for itself"
    ),
    "local_change": (
        "DDP reduces the gradients, and each rank then changes its own (clipping by a local norm, noise), or "
        "the last forward pass before the step was made within no_sync(), or a communication hook reduces nothing"
    ),
    "start": (
        "each rank initialised its own parameters (another seed), and nothing broadcast them; or they were "
        "changed after DDP was built"
    ),
    "diverged": (
        "gradients and learning rates are equal, so something else changes parameters on one rank alone "
        "(noise, weight averaging, a checkpoint loaded on rank 0 only)"
    ),
    "gradients_unseen": (
        "no gradients were seen on all ranks, so it can't be told: they aren't reduced, or something else changes"
        " parameters on one rank alone"
    ),
    "end": (
        "at the end only: something was loaded or changed on one rank after the last compared step (the best"
        " checkpoint, an average of the weights), which is no mistake; or ranks parted in the steps since"
    ),
    "parts": "each rank's optimiser updates a part of the parameters, and not all parts come to all ranks after a step",
    "own_state": (
        "an optimiser that compresses gradients keeps the rest for its next step (error feedback), which is each rank's"
        " own and no mistake; or moments of the rank's own gradients, which should be of reduced ones"
    ),
    "moments": (
        "the optimiser's state came from different places (a checkpoint loaded on one rank only, an optimiser"
        " that was built anew)"
    ),
    "loaded": "a checkpoint of the optimiser was loaded on some ranks only, or from different files",
    "settings": "the optimiser is built from values that aren't the same on every rank",
    "frozen": (
        "a model that isn't trained (a target, a reference, an average, a frozen critic) was initialised by each rank,"
        " or copied before the parameters of rank 0 were sent to all"
    ),
    "frozen_later": (
        "a model that isn't trained is another one on every rank since: a copy that each rank updates in its own way,"
        " or opponents that each rank draws for itself, which is no mistake"
    ),
    "no_steps": (
        "the script doesn't train with a torch.optim optimiser in the ranks' own processes, or ended before its first"
        " step"
    ),
    "no_steps_compiled": (
        "the script's optimiser steps in compiled code (torch.compile), where no step can be seen; or it doesn't train"
        " with a torch.optim optimiser in the ranks' own processes"
    ),
    "unstepped": (
        "an optimiser steps in compiled code (torch.compile), where no step can be seen, and its gradients aren't"
        " reduced; or each rank loads a model from elsewhere (opponents that it draws), which is no mistake"
    ),
    "server": "the rank that steps doesn't send all parameters to the others after each step",
    "unmatched": "they are held where no name leads that is the same on every rank",
    "rates": "each rank adapts its learning rate by a value of its own (the KL divergence of its own data)",
    "steps": (
        "a rank ends its epochs by a value of its own (the KL divergence of its own minibatch, its own loss):"
        " from then on ranks pair different minibatches, and in the end one waits for a step that never comes"
    ),
    "steps_alone": (
        "some ranks alone train what the others have, too, and the others weren't seen to hold the same afterwards"
    ),
    "parts_alone": (
        "each rank steps its part of the parameters with its own gradient, and what the others computed of it from"
        " their data is lost (ZeroRedundancyOptimizer reduces nothing itself: that is left to DDP's own forward)"
    ),
    "phases": "that rank evaluates or logs, which is no mistake; or it always ends its epochs before the others do",
    "alone": "all ranks step with one rank's gradient, and what the others computed from their own data is lost",
    "varying_phases": (
        "each rank's data decide when it makes such a pass (an action that explores, a value where an episode goes on),"
        " or ranks evaluate by turns, which is no mistake; or ranks end their epochs by their own values"
    ),
    "normalizers": (
        "each rank normalises by statistics of its own environments: the same observation is another input on"
        " every rank, and only one rank's statistics are saved"
    ),
    "environment_normalizers": (
        "a wrapper around each environment keeps that environment's statistics, as it does in one process with as many"
        " environments, which is no mistake; or these environments should share what they see, and don't"
    ),
    "lone_normalizer": (
        "one rank alone evaluates, with a copy of the merged statistics, which is no mistake; or it alone updates them"
        " and doesn't send them to the others"
    ),
    "lone_optimizer": (
        "that rank trains something for itself (a probe for a plot, a model for its log), which is no mistake; or what"
        " all ranks should train, and the agent depends on it"
    ),
    "buffers": "buffers are updated from each rank's own data and never combined",
    "own_buffers": (
        "buffers hold data of the rank's own (a cache, an environment's or a recurrent state), which is no mistake; or"
        " they are learned or counted from each rank's own data and never combined"
    ),
    "passing": (
        "each rank optimises something of its own data (a plan, an adversarial example, a latent code), which is no"
        " mistake; or parameters that all ranks should share are made anew, and never reduced"
    ),
    "data": (
        "every rank uses the same seed for its environments, its sampling or its data order: N ranks do the work of one"
    ),
    "lost": "the disk or the quota is full where ranks leave what is compared; or the process ended from within C code",
    "still": "a call that takes long (a download, a big file, another program), or a rank that waits for ever",
    "others_reduced": "other gradients of the script are reduced before the step, and these are not",
    "parted": (
        "a rank left a loop or took a branch by a value of its own, and came to another collective or took another"
        " number of steps than the others: lockstep.attach compared them and stopped all"
    ),
    "parted_or_alone": (
        "a rank ends its epochs by a value of its own (the KL divergence of its own minibatch) and collects already; or"
        " one rank alone runs the module without gradients, which by itself leaves them one agent"
    ),
    "different_collectives": (
        "ranks were probably at different collectives, whose sizes don't fit (gloo then aborts a rank): one ended its"
        " epochs by a value of its own (the KL divergence of its own minibatch), left a loop earlier, or took another"
        " branch; if not, what that rank printed last says what it died of"
    ),
    "waiting": "ranks took a different number of collectives: one left its loop earlier, or took another branch",
}

FIXES = {
    "independent": "torch.distributed.init_process_group() first, then DDP; or " + ATTACH,
    "bypassed": BARE + "; or call agent(...) itself, with a forward that returns all that the loss needs",
    "bypassed_sb3": SB3,
    "partly_reduced": "wrap all that the optimiser updates, in one module; or " + ATTACH,
    "outside_ddp": "wrap that module, too; or lockstep.attach([actor, critic], [optimizer, …]) with all of them",
    "outside_fsdp": "give fully_shard the module that holds them, too; tensors outside of modules need a module first",
    "skipped": "reduce every parameter of the optimiser, in a loop over its param_groups; or " + ATTACH,
    "required": "set requires_grad alike on every rank, before DDP or lockstep.attach",
    "summed": "divide by the number of ranks after the all-reduce, or ReduceOp.AVG, unless the loss is divided; or "
    + ATTACH,
    "averaged_twice": "divide once: ReduceOp.AVG, DDP and lockstep.attach have divided already",
    "unreduced": "reduce p.grad itself, of every parameter, after backward() and before clipping; or " + ATTACH,
    "unreduced_sb3": SB3,
    "sometimes": "reduce before every step; or " + ATTACH,
    "rounding": "torch.use_deterministic_algorithms(True), and reduce by one collective whose result all ranks take",
    "local_change": (
        "clip after backward() by the norm of the reduced gradient, the same on every rank; end no_sync() "
        "before the last forward pass; let the hook return what it has reduced"
    ),
    "start": (
        "seed the initialisation alike on every rank, or broadcast from rank 0 before the first step (DDP's "
        "constructor and lockstep.attach do)"
    ),
    "gradients_unseen": "reduce the gradients before each step; or " + ATTACH,
    "diverged": "do it on every rank alike, from combined values, or broadcast the parameters afterwards",
    "end": "an --interval by which the last steps are compared, too; if it was meant for all, do it on every rank",
    "blindness": "the script isn't to blame: please report that line, and what the step or forward pass was given",
    "parts": "gather the parts of all ranks after each step, and write them to every parameter of the model",
    "own_state": "none if that is meant; else reduce gradients before the moments are updated",
    "moments": "load the optimiser's state on every rank from the same file",
    "loaded": "load the optimiser's state on every rank from the same file, or on none",
    "settings": "build it from the same configuration on every rank",
    "frozen": (
        "copy it from the trained model after DDP or lockstep.attach has sent rank 0's, or broadcast it from rank 0"
    ),
    "no_steps_compiled": "call optimizer.step() outside of compiled code while the doctor looks",
    "unstepped": "call optimizer.step() outside of compiled code while the doctor looks",
    "server": "broadcast every parameter and buffer from the rank that steps, after each step",
    "unmatched": "hold them as attributes mean, var and count of an object that a variable of the script leads to",
    "rates": "decide together: all-reduce the value (lockstep.all_mean) before the learning rate is changed by it",
    "steps": (
        "decide together: all-reduce the value before it is compared (lockstep.all_mean), or lockstep.stop_if(flag)"
    ),
    "steps_alone": "take these steps on every rank; or broadcast the parameters after them, before they are used",
    "parts_alone": (
        "reduce the gradients of all parameters before the step, or each to the rank that holds it; behind DDP, call"
        " ddp(...) itself, with a forward that returns all that the loss needs"
    ),
    "phases": "let the script come to its end, after fewer steps: then it shows",
    "varying_phases": "none if data or turns decide; else all-reduce the value before comparing it (lockstep.all_mean)",
    "normalizers": (
        "merge counts, means and squares of all ranks after each rollout; lockstep.integrations.sb3 does it "
        "for VecNormalize"
    ),
    "environment_normalizers": (
        "one normaliser around the vector environment, whose counts, means and squares all ranks merge after each"
        " rollout: then there is one to save"
    ),
    "lone_normalizer": "make the evaluation's normaliser on that rank alone; broadcast what all ranks should have",
    "lone_optimizer": "none if the agent doesn't depend on it; else make and train it on every rank, or broadcast it",
    "buffers": "torch.nn.SyncBatchNorm for BatchNorm; all-reduce other statistics after each rollout",
    "own_buffers": "all-reduce what all ranks should share; keep a rank's own data in plain attributes, not in buffers",
    "passing": "none if these are the rank's own; else reduce their gradients, too",
    "alone": "torch.distributed.all_reduce(p.grad) in place of the broadcast, then divide by the number of ranks",
    "data": "initialise alike, then seed environments and sampling by rank (lockstep.shard_seed(seed))",
    "lost": "give --directory DIR with more room, or a larger --interval",
    "still": "if that call may take so long, a larger --time-limit; else look where the stacks stand",
    "others_reduced": "reduce these as well; or lockstep.attach([…], […]) with all modules and all optimisers",
    "parted_or_alone": (
        "decide together: all-reduce the value before it is compared (lockstep.all_mean), or lockstep.stop_if(flag);"
        " what one rank runs alone, under module.eval()"
    ),
    "different_collectives": (
        "decide together: all-reduce the value before it is compared (lockstep.all_mean), or lockstep.stop_if(flag)"
    ),
    "waiting": "let all ranks take the same decision from a reduced value before they leave a loop or branch",
}

UNSEEN = (
    "edits of p.data, replays of CUDA graphs, environments and normalisers in worker processes, "
    "processes that the script starts itself"
)
"""What no report covers."""
UNSEEN_SUMS = "whether gradients are averaged or only summed"
"""Not covered either if gradients were clipped or scaled before every compared step."""
