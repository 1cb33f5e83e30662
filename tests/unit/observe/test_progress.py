"""Progress is lines in a pipe, one live line on a terminal, and rates over the last steps."""

import io
from dataclasses import replace

from rich.console import Console

from plait.events import (
    CheckpointSaved,
    CommunicationSelected,
    RunStarted,
    StepDone,
    Validated,
)
from plait.observe.progress import ProgressLines, RateWindow


def step(number, *, loss=3.25, tokens=1000, seconds=0.5, skipped=False):
    return StepDone(number, loss, 0.5, 1e-3, 64.0, skipped, 10.0, tokens, seconds, 300 * 1024**2)


def printed(*events, terminal=False, every=2):
    stream = io.StringIO()
    lines = ProgressLines(Console(file=stream, force_terminal=terminal, width=100), every=every)
    lines(RunStarted(0, 5, 2, 100, "dp_shard=2", "runs/x"))
    for event in events:
        lines(event)
    lines.close()
    return stream.getvalue()


def test_lines_in_a_pipe_have_no_control_characters():
    validated = Validated(2, 1.0, 4096.0, 0.1)
    saved = CheckpointSaved(3, "c/step-3", 0.25)
    text = printed(step(1), step(2), validated, step(3), saved, step(5))
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.splitlines() == [
        "step 1  loss 3.2500  2,000 tok/s  2.0 s left  300.0 MiB  lr 1.0e-03  norm 0.50",
        "step 2  loss 3.2500  2,000 tok/s  1.5 s left  300.0 MiB  lr 1.0e-03  norm 0.50",
        "step 2  validation loss 1.0000, perplexity 2.7, 4,096 targets",
        "step 3  checkpoint c/step-3, 0.2 s",
        "step 5  loss 3.2500  2,000 tok/s  0.0 s left  300.0 MiB  lr 1.0e-03  norm 0.50",
    ]


def test_a_terminal_shows_every_step_in_place():
    text = printed(step(1), step(2), step(3), terminal=True)
    assert "\x1b" in text
    assert "3/5" in text
    assert text.count("step 2  loss") == 1
    assert "step 3  loss" not in text


def test_a_line_has_the_mean_loss_since_the_previous_line():
    steps = [step(number, loss=loss) for number, loss in enumerate((9.0, 5.0, 2.0, 1.0, 4.0), 1)]
    lines = printed(*steps, every=4).splitlines()
    assert [line.split()[1:4] for line in lines] == [
        ["1", "loss", "9.0000"],
        ["4", "loss", "2.6667"],
        ["5", "loss", "4.0000"],
    ]


def test_a_skipped_step_always_has_a_line():
    assert "skipped, overflow at scale 64" in printed(step(1, skipped=True))


def test_communication_has_lines_if_it_is_not_the_default():
    selected = CommunicationSelected(2, "int8 from here on")
    assert "step 2  int8 from here on\n" in printed(selected)
    reason = "gradients are reduced by torch: the backend is nccl"
    started = RunStarted(0, 5, 2, 10, "dp_replicate=2", "runs/x", communication=reason)
    assert "gradients" not in printed(started)
    notable = replace(started, notable_communication="sent as int8")
    assert "ranks   sent as int8\n" in printed(notable)


def test_rates_are_those_of_the_last_steps():
    window = RateWindow()
    window.add(step(1, seconds=19.0))
    assert window.seconds_per_step == 19.0
    window.add(step(2, seconds=1.0))
    assert window.seconds_per_step == 1.0, "the first step is slower than all others"

    for seconds in (10.0, 1.0):
        for number in range(100):
            window.add(step(number, seconds=seconds))
    assert window.tokens_per_second == 1000.0
    assert window.seconds_per_step == 1.0
    window.add(step(0, seconds=100.0))
    assert window.seconds_per_step == 100.0, "one step may be longer than the window"


def test_the_perplexity_of_a_huge_loss_is_infinite():
    assert "perplexity inf" in printed(Validated(2, 1e4, 10.0, 0.1))
