"""What the computations of a pipeline send and need, written apart from `Numbered`, which the schedules themselves go by."""

from plait.parallel.schedules.schedule import Kind, Message, Payload


def produced_by(action):
    """What a computation sends; None for W, for which nothing waits."""
    if action.kind is Kind.FORWARD:
        return Message(Payload.ACTIVATION, action.stage, action.microbatch)
    if action.kind is Kind.WEIGHT:
        return None
    return Message(Payload.GRADIENT, action.stage, action.microbatch)


def needed_by(action, *, stages):
    """What must exist before a computation can start, the stage's own earlier results included, in a pipeline of `stages` stages."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return (Message(Payload.ACTIVATION, stage - 1, microbatch),) if stage > 0 else ()
    if action.kind is Kind.WEIGHT:
        return (Message(Payload.GRADIENT, stage, microbatch),)
    own = Message(Payload.ACTIVATION, stage, microbatch)
    return (own, Message(Payload.GRADIENT, stage + 1, microbatch)) if stage < stages - 1 else (own,)
