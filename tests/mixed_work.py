"""A mixed workload for one engine: what may be asked of its steps after the start."""

from trimaran.device_workers.execution.contract import StepEngine
from trimaran.ipc.plan import RowFlag

from .step_driver import Row, StepDriver

ASKING = {
    "row_flags": RowFlag.PENALTIES | RowFlag.BIAS | RowFlag.LOGPROBS | RowFlag.MIN_TOKENS,
    "temperatures": 0.9,
    "top_ks": 50,
    "top_ps": 0.9,
    "min_ps": 0.05,
    "seeds": 11,
    "presence_penalties": 0.5,
    "repetition_penalties": 1.2,
    "min_lengths": 100,
}


def work(engine: StepEngine) -> None:
    """Prompts of odd lengths in chunks, 1 to 40 sequences, and every way of asking for tokens."""
    for num_rows in (1, 2, 3, 5, 7, 16, 17, 25, 33, 40):
        rows = [
            Row(row=index, tokens=[3 + index + place % 7 for place in range(1 + index % 13)])
            for index in range(num_rows)
        ]
        StepDriver(engine).generate(rows, 3, chunk=5)
        engine.drop_rows()
    for num_tokens in (*range(1, 20), 37, 200):
        StepDriver(engine).generate([Row(row=0, tokens=[5] * num_tokens)], 2)
    for num_top in range(21):
        drawn = [
            Row(
                row=index, tokens=[3, 4, 5], parameters={**ASKING, "num_logprobs": num_top}, bias={17: 2.0}, banned=(2,)
            )
            for index in range(1 + num_top % 4)
        ]
        StepDriver(engine).generate(drawn, 2)
        engine.drop_rows()
        scored = Row(row=0, tokens=[1] * (2 + 2 * num_top), parameters={"num_prompt_logprobs": num_top})
        StepDriver(engine).run([(scored, len(scored.tokens))], prompt_logprobs=True)
        engine.drop_rows()
    masked = Row(row=8, tokens=[1, 2])
    StepDriver(engine).run([(masked, 2)], masks={8: [40, 41]})
