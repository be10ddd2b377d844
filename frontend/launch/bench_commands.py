"""`trimaran bench serve | engine`: the flags of the benchmarks, under the names that `vllm bench serve` has."""

import subprocess
import sys
from typing import TYPE_CHECKING

from .children import module_command
from .server_url import server_url

if TYPE_CHECKING:
    import typer

_MAX_SEQUENCES = 4096


def build_bench() -> "typer.Typer":
    """The `bench` commands as a typer application."""
    import typer

    bench = typer.Typer(help="Measure a server, or the engine core alone.", no_args_is_help=True)

    @bench.command(name="serve", help="Measure a running server through its HTTP API.")
    def serve_command(
        base_url: str = typer.Option("http://127.0.0.1:8000", help="where the server is"),
        model: str = typer.Option("", help="the model's name; the server's first if empty"),
        dataset_name: str = typer.Option("random", help="random, prefix (shared prefixes) or jsonl"),
        dataset_path: str = typer.Option("", help="the file of --dataset-name jsonl"),
        num_prompts: int = typer.Option(100, min=1, help="requests to send"),
        input_len: int = typer.Option(512, min=1, help="prompt length in tokens"),
        output_len: int = typer.Option(128, min=1, help="answer length in tokens"),
        range_ratio: float = typer.Option(0.0, min=0.0, max=1.0, help="lengths spread by this share, either way"),
        num_prefixes: int = typer.Option(8, min=1, help="different prefixes of --dataset-name prefix"),
        prefix_len: int = typer.Option(256, min=1, help="their length in tokens"),
        request_rate: float = typer.Option(float("inf"), min=0.001, help="requests per second; inf sends all at once"),
        burstiness: float = typer.Option(1.0, min=0.01, help="1 is a Poisson process, less is more bursty"),
        max_concurrency: int = typer.Option(0, min=0, help="most requests at once; 0 is no limit"),
        num_processes: int = typer.Option(1, min=1, help="client processes to share the load"),
        temperature: float = typer.Option(0.0, min=0.0, help="sampling temperature"),
        api_key: str = typer.Option("", help="key, if the server asks for one"),
        timeout: float = typer.Option(600.0, min=1.0, help="seconds after which a request counts as failed"),
        seed: int = typer.Option(0, help="seed of lengths and prompts"),
        result_file: str = typer.Option("", help="write the report as JSON here"),
    ) -> None:
        from ...ipc.conditions import Refusal
        from ..bench.serve import BenchServe, bench_serve
        from ..bench.workload import Workload

        asked = BenchServe(
            base_url=server_url(base_url),
            model=model or None,
            workload=Workload(
                kind=dataset_name,
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
                range_ratio=range_ratio,
                dataset_path=dataset_path or None,
                num_prefixes=num_prefixes,
                prefix_len=prefix_len,
                seed=seed,
            ),
            request_rate=request_rate if request_rate < float("inf") else None,
            burstiness=burstiness,
            max_concurrency=max_concurrency or None,
            num_processes=num_processes,
            api_key=api_key or None,
            temperature=temperature,
            timeout_s=timeout,
            result_file=result_file or None,
        )
        try:
            report = bench_serve(asked)
        except Refusal as refusal:
            print(f"trimaran bench: {refusal}", file=sys.stderr)
            raise typer.Exit(2) from None
        raise typer.Exit(1 if report["failed"] else 0)

    @bench.command(name="engine", help="Measure the engine core alone, on a worker that answers at once.")
    def engine_command(
        sequences: str = typer.Option("64,256,1024", help="numbers of running sequences, separated by commas"),
        steps: int = typer.Option(300, min=10, help="steps to measure at each"),
    ) -> None:
        sizes = sequences.split(",")
        if not all(size.isdecimal() and 1 <= int(size) <= _MAX_SEQUENCES for size in sizes):
            raise typer.BadParameter(
                f"give whole numbers from 1 to {_MAX_SEQUENCES}, such as 64,256", param_hint="--sequences"
            )
        # A process of its own: the frontend's side of the fence does not import the core.
        command = [*module_command("engine_core.bench"), "--sequences", sequences, "--steps", str(steps)]
        raise typer.Exit(subprocess.run(command, check=False).returncode)

    return bench
