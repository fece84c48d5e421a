"""The command line: laminar run | sim | chaos | config | replay | report | export | bench."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from laminar import __version__
from laminar.settings import all_settings, load_config

BENCHMARKS = ("control", "engine", "loop", "moves", "relay", "rewards", "sandbox", "trainer", "vllm")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and do; a mistake of the user's is one message on stderr and exit status 2."""
    arguments = _parse(argv)
    try:
        return arguments.do(arguments)
    except ValueError as error:
        print(f"laminar {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped before anything was started", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough (`laminar config | head`); Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before and after the options, which argparse alone does not allow."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (arguments.command not in ("run", "sim") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="laminar", description="Asynchronous RL post-training of language models.")
    parser.add_argument("--version", action="version", version=f"laminar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="train with a configuration")
    run.add_argument("config", type=Path, help="YAML file; configs/ has some to start from")
    run.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that differ from the file")
    run.add_argument(
        "--dry-run", action="store_true", help="check everything, print the resolved settings, start nothing"
    )
    kind = run.add_mutually_exclusive_group()
    kind.add_argument("--resume", action="store_true", help="go on with the run in run_dir")
    kind.add_argument("--fresh", action="store_true", help="move the run that is in run_dir aside")
    run.set_defaults(do=_run)

    sim = commands.add_parser("sim", help="run a configuration on simulated accelerators")
    sim.add_argument("config", type=Path, nargs="?", help="YAML file; its `simulation` section says what to simulate")
    sim.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that differ from the file")
    sim.add_argument("--schedules", metavar="a,b", help="which to compare; without it all of them")
    sim.add_argument(
        "--published", metavar="SERIES", help="instead: the published runs of 7B_math, 32B_math or 72B_math"
    )
    sim.add_argument("--out", type=Path, help="folder for event logs, summaries and reports, as live runs write them")
    sim.add_argument("--json", action="store_true", help="one JSON object a schedule, or a published run")
    sim.set_defaults(do=_sim)

    chaos = commands.add_parser("chaos", help="look for a fault that breaks the control plane, in simulation")
    chaos.add_argument("config", type=Path, nargs="?", help="YAML file to simulate; without it a small cluster")
    chaos.add_argument("--seeds", type=int, default=100, metavar="N", help="scenarios to try (default 100)")
    chaos.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one's seed (default 0)")
    chaos.add_argument("--scenario", type=Path, metavar="FILE", help="run this scenario again instead")
    chaos.add_argument("--json", action="store_true", help="one JSON object a seed")
    chaos.set_defaults(do=_chaos)

    config = commands.add_parser("config", help="list every setting, its default, unit and meaning")
    config.set_defaults(do=_config)

    replay = commands.add_parser("replay", help="decide a run's log again and compare the commands")
    replay.add_argument("run_dir", type=Path)
    replay.set_defaults(do=_replay)

    report = commands.add_parser("report", help="write a run's report.html and summary.json")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(do=_report)

    export = commands.add_parser("export", help="write a run's newest checkpoint as a Hugging Face folder")
    export.add_argument("run_dir", type=Path)
    export.add_argument("out", type=Path)
    export.set_defaults(do=_export)

    bench = commands.add_parser("bench", help="measure a part on this machine")
    bench.add_argument("what", choices=BENCHMARKS)
    bench.add_argument("--json", action="store_true", help="one JSON object a measurement")
    bench.set_defaults(do=_bench)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    if arguments.dry_run:
        from laminar.dry_run import dry_run

        return dry_run(config)
    from laminar.run import run

    return run(config, resume=arguments.resume, fresh=arguments.fresh)


def _sim(arguments: argparse.Namespace) -> int:
    if arguments.published is not None:
        from laminar.sim.reproduce import reproduce

        if (arguments.config, arguments.schedules, arguments.out) != (None, None, None):
            raise ValueError("--published has configurations of its own; give either it or a CONFIG with its options")
        return reproduce(arguments.published, as_json=arguments.json)
    if arguments.config is None:
        raise ValueError("name a CONFIG (configs/sim_32b_128.yaml is one), or --published SERIES")
    from laminar.sim.compare import compare, parse_schedules

    config = load_config(arguments.config, arguments.overrides)
    return compare(config, parse_schedules(arguments.schedules), as_json=arguments.json, out=arguments.out)


def _chaos(arguments: argparse.Namespace) -> int:
    from laminar.sim.hunt import default_config, hunt, rerun

    if arguments.seeds < 1:
        raise ValueError(f"--seeds {arguments.seeds}: at least one is needed")
    config = default_config() if arguments.config is None else load_config(arguments.config, ())
    if arguments.scenario is not None:
        return rerun(config, arguments.scenario, as_json=arguments.json)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return hunt(config, seeds, as_json=arguments.json)


def _config(arguments: argparse.Namespace) -> int:
    del arguments
    for setting in all_settings():
        print(f"{setting.name} ({setting.type}) = {setting.default}\n    {setting.meaning}")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from laminar.observe.replay import replay

    report = replay(arguments.run_dir)
    print(report.text())
    return 0 if report.difference is None else 1


def _report(arguments: argparse.Namespace) -> int:
    from laminar.observe.report import write_report

    print(write_report(arguments.run_dir))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from laminar.train.export import export_checkpoint

    export_checkpoint(arguments.run_dir, arguments.out)
    print(arguments.out)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    options = ["--json"] if arguments.json else []
    match arguments.what:
        case "control":
            from laminar.bench.control import main as bench
        case "engine":
            from laminar.bench.engine import main as bench
        case "relay":
            from laminar.bench.relay import main as bench
        case "sandbox":
            from laminar.bench.sandbox import main as bench
        case "rewards":
            from laminar.bench.rewards import main as bench
        case "trainer":
            from laminar.bench.trainer import main as bench
        case "moves":
            from laminar.bench.moves import main as bench
        case "vllm":
            from laminar.rollout.engines.vllm_setup import refuse_without_vllm

            refuse_without_vllm()
            from laminar.bench.vllm import main as bench
        case _:
            from laminar.bench.loop import main as bench
    return bench(options)
