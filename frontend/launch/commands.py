"""The command line: `trimaran serve | probe | doctor | explain | kernels | chat | bench | demo`.

`serve` is the way most starts go, so it does not wait for typer: its options are read by `options.py` either way.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from .supervisor import Supervisor

ONE_WISH_S = 0.5  # signals that come this close together are one
_INSPECTIONS = {
    "probe": "List platforms and devices: what is declared, detected or measured of each.",
    "doctor": "Judge this machine before serving: verdicts with cures, exit status 0, 1 or 2.",
    "explain": "Say how a model would be served and why, without its weights and without the device.",
    "diagnose": "Measure the device, and write a file for --device-config.",
    "kernels": "List kernel implementations, what serves where, and check them against the reference.",
}
"""Commands that look at the machine; they take the options of `serve`."""
SERVE_HELP = "Serve a model over the OpenAI API; `trimaran serve --help` lists the options."


def main() -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        raise SystemExit(serve(arguments[1:]))
    if arguments and arguments[0] in _INSPECTIONS:
        raise SystemExit(_inspection(arguments[0])(arguments[1:]))
    if arguments == ["--version"]:
        sys.argv[1:] = ["version"]
    build()()


def build() -> "typer.Typer":
    """The commands as a typer application."""
    import typer

    from .bench_commands import build_bench
    from .demo import install

    application = typer.Typer(
        name="trimaran", help=f"{_package_doc()}", no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )
    demo = typer.Typer(help="The packaged demo model.", no_args_is_help=True)

    @application.command(
        name="serve",
        help=SERVE_HELP,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def serve_command(context: typer.Context) -> None:
        raise typer.Exit(serve(context.args))

    for name, text in _INSPECTIONS.items():
        _add_inspection(application, name, text)

    @application.command(name="chat", help="Talk to a server that runs.")
    def chat_command(
        url: str = typer.Option("http://127.0.0.1:8000", help="where the server is"),
        model: str = typer.Option("", help="the model's name; the server's first if empty"),
        api_key: str = typer.Option("", help="key, if the server asks for one"),
        system: str = typer.Option("", help="system message"),
        max_tokens: int = typer.Option(512, help="longest answer in tokens"),
    ) -> None:
        from .chat import Chat, ChatFailed

        try:
            Chat(url, model=model, api_key=api_key, system=system, max_tokens=max_tokens).talk()
        except ChatFailed as failure:
            print(f"trimaran chat: {failure}", file=sys.stderr)
            raise typer.Exit(1) from None

    @application.command(name="version", help="Print the version.")
    def version_command() -> None:
        from ... import __version__

        print(f"trimaran {__version__}")

    @demo.command(name="install", help="Install the demo model into this environment.")
    def demo_install_command() -> None:
        raise typer.Exit(install())

    @demo.command(name="path", help="Print where the demo model is.")
    def demo_path_command() -> None:
        from ...ipc.conditions import Refusal
        from .model_source import demo_file

        try:
            print(demo_file())
        except Refusal as refusal:
            print(f"trimaran demo: {refusal}", file=sys.stderr)
            raise typer.Exit(1) from None

    application.add_typer(build_bench(), name="bench")
    application.add_typer(demo, name="demo")
    return application


def _add_inspection(application: "typer.Typer", name: str, text: str) -> None:
    import typer

    @application.command(
        name=name,
        help=text,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def command(context: typer.Context) -> None:
        raise typer.Exit(_inspection(name)(context.args))


def _inspection(name: str) -> Callable[[Sequence[str]], int]:
    if name == "explain":
        from .explain import explain

        return explain
    if name == "diagnose":
        from .diagnose import diagnose

        return diagnose
    from . import inspection_commands

    return {
        "probe": inspection_commands.probe,
        "doctor": inspection_commands.doctor,
        "kernels": inspection_commands.kernels,
    }[name]


def serve(arguments: Sequence[str]) -> int:
    """`trimaran serve`: the exit code. 0 after an end that was asked for, else the cause is the last line printed."""
    from .options import OptionError, help_text, inherited_environment, read_options

    if "--help" in arguments or "-h" in arguments:
        print(help_text())
        return 0
    try:
        options = read_options(arguments, inherited_environment()).options
    except OptionError as error:
        print(f"trimaran serve: {error}", file=sys.stderr)
        return 2
    import asyncio

    from ...ipc.conditions import Refusal, TrimaranError
    from .progress import create_progress
    from .supervisor import Supervisor

    progress = create_progress()

    async def run() -> None:
        supervisor = Supervisor(options, progress)
        _install_signals(supervisor)
        await supervisor.run()

    try:
        asyncio.run(run())
    except Refusal as refusal:
        progress.line(f"trimaran serve: {refusal}")
        return 2
    except TrimaranError as error:
        progress.line(f"trimaran serve: {error}")
        return 1
    finally:
        progress.close()
    return 0


def _install_signals(supervisor: "Supervisor") -> None:
    import asyncio
    import signal
    import time

    loop = asyncio.get_running_loop()
    first_s: list[float] = []

    def terminate() -> None:
        # One wish may arrive twice: by the process group, and again from a parent that passes it on, such as make.
        now = time.monotonic()
        if not first_s or now - first_s[0] > ONE_WISH_S:
            first_s.append(now)
            supervisor.terminate()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and shells' background jobs ignore some on purpose
            loop.add_signal_handler(number, terminate)


def _package_doc() -> str:
    from ... import __doc__ as text

    return (text or "").splitlines()[0]


if __name__ == "__main__":
    main()
