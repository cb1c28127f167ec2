"""The `drq` command: thin, everything it does is a function elsewhere."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from drq.errors import DeviceLost, UserError, did_you_mean, end_at_once

USAGE = """usage: drq COMMAND ...

  demo        see augmentation work in five minutes
  train       train an agent: drq train dmc/walker-walk --preset planet
  eval        play a trained agent: drq eval runs/walker --episodes 10 --video walker.mp4
  export      take the policy away in one file: drq export runs/walker --out walker.drq
  check       is my environment fit for training? drq check gym/MyEnv-v0 --import my_env
  tasks       list the tasks and their action repeats
  suite       the paper's experiments: drq suite list; drq suite run planet; drq suite status runs/planet
  report      a page with curves and tables: drq report runs/planet --out report.html
  watch       the same page live, while runs train: drq watch runs
  speed       how fast this machine trains
  doctor      check this machine
  completion  complete commands, options and tasks in bash, zsh or fish

`drq COMMAND --help` explains each.
"""


OFTEN_USED = """The options used most:
  --preset NAME             where to start from: {presets}
  --steps N                 how long to train
  --seed N                  everything random follows from it
  --dir FOLDER              where the run is kept; the same command again resumes it
  --agent NAME              {agents}; unset, what the task's actions ask for
  --device cpu|cuda         where the agent learns
  --import MODULE           a module or file of yours that registers environments
  --config FILE             settings from a TOML file, or from the config.json of another run
  --agent.augmentation F    shift, cutout, rotate, intensity, none, ... joined by +
  --agent.k N --agent.m N   views averaged in targets and in losses
  --eval.every N            steps between evaluations
"""


def train_command(args: list[str]) -> None:
    """Trains an agent, or resumes it: the same command again goes on where the folder's checkpoint is."""
    from drq import presets
    from drq.agents import AGENTS
    from drq.config import TrainConfig
    from drq.settings import config_to_json, flat, modules_of, refuse_unnamed_modules
    from drq.training.run import train

    file, args = _take_option(args, "--config")
    settings = presets.settings_in(Path(file)) if file else {}
    if settings:  # the file may be a stranger's
        asked = modules_of(str(settings.get("task", "")), flat(settings))
        refuse_unnamed_modules(asked, _values(args, "--import", "--imports"), file)
    task, args = _task(args, settings.get("task"))
    preset_name, args = _take_option(args, "--preset")
    agent_name, args = _take_option(args, "--agent")
    # What must be known before the defaults of all the rest are: which environment it is, and so which agent suits.
    early = {
        "preset": preset_name,
        "agent.type": agent_name,
        "imports": _values(args, "--import", "--imports"),
        "env.kwargs": _take_option(args, "--env.kwargs")[0],
        "env.wrap": _values(args, "--env.wrap"),
    }
    settings = flat(settings) | {name: value for name, value in early.items() if value}
    default = presets.configure(task, settings)
    _refuse_values_of_switches(args, flat(config_to_json(default)))
    config = tyro.cli(
        TrainConfig,
        prog="drq train TASK",
        description=f"{train_command.__doc__}\n\n"
        f"{OFTEN_USED.format(presets=', '.join(presets.PRESETS), agents=' or '.join(AGENTS))}\n"
        f"The defaults below are those of {default.preset!r} for {task}.",
        default=default,
        args=args,
        config=(tyro.conf.AvoidSubcommands,),
    )
    train(config)


Imports = Annotated[tuple[str, ...], arg(aliases=["--import"])]


@dataclass(frozen=True)
class EvalArguments:
    """Plays evaluation episodes with a trained agent and prints its return."""

    run: Positional[Path]
    """The run folder, or a file that `drq export` wrote."""
    best: bool = False
    """Of a run folder: what acted in its evaluation with the highest mean return, not the latest checkpoint."""
    episodes: int | None = None
    """How many episodes. Unset: as in the run's own evaluations."""
    video: Path | None = None
    """Write a video of the first episode here."""
    seed: int = 0
    """Another seed gives other episodes."""
    imports: Imports = ()
    """Modules imported first, by name or as a file (../my_env.py), such as the one that registers your environment."""
    stochastic: bool = False
    """Play the exploring policy, as training does."""
    json: bool = False
    """Print JSON: each episode's return and length, and numbers of its `info`."""
    render: Literal["human"] | None = None
    """`human` shows the episodes in a window, one after the other."""


def eval_command(args: list[str]) -> None:
    from drq.training.clock import Clock
    from drq.training.policy import evaluate
    from drq.training.progress import Progress, info_text, return_text

    options = tyro.cli(EvalArguments, prog="drq eval", args=args)
    clock = Clock()
    progress = Progress(budget=0, unit="", clock=clock, quiet=not sys.stderr.isatty())  # ten episodes take minutes
    try:
        with clock.evaluating:
            played = evaluate(options.run, show_progress=progress.show_evaluation, **_but(options, "run", "json"))
    finally:
        progress.close()
    if options.json:
        episodes = [
            {"return": each.score, "agent_steps": each.agent_steps, "info": each.info} for each in played.episodes
        ]
        found = {"return_mean": played.mean, "return_std": played.std, "info": played.info, "episodes": episodes}
        print(json.dumps(found, indent=2))
        return
    count = f"{len(played.episodes)} episode{'s' * (len(played.episodes) != 1)}"
    std = played.std if len(played.episodes) > 1 else None
    print(f"return {return_text(played.mean, std)} over {count}{info_text(played.info)}")
    if options.video is not None:
        print(f"video: {options.video}")


@dataclass(frozen=True)
class ExportArguments:
    """Writes a trained policy to one file: the weights that acting needs, preprocessing and action range."""

    run: Positional[Path]
    """The run folder, or a .drq file."""
    out: Path
    """The file to write."""
    best: bool = False
    """Of a run folder: what acted in its evaluation with the highest mean return, not the latest checkpoint."""
    format: Literal["drq", "onnx", "pt2"] | None = None
    """drq: for `drq.load` and `drq eval`; onnx, pt2 (torch.export): a graph. Unset: as the file's name ends."""
    dtype: Literal["float32", "bf16"] = "float32"
    """Of the weights in the file: bf16 halves it. Actions are computed in float32 all the same."""
    frame: str | None = None
    """Raw frames that a graph takes, as 480x640x3; it resizes them as training did. Unset: as the agent sees them."""
    imports: Imports = ()
    """Modules imported first, where the agent is one of your own."""


def export_command(args: list[str]) -> None:
    from drq.training.export import export

    options = tyro.cli(ExportArguments, prog="drq export", args=args)
    try:
        frame = [int(side) for side in options.frame.split("x")] if options.frame else None
    except ValueError:
        raise UserError(f"--frame is {options.frame!r}: write it as 480x640x3.") from None
    out = export(options.run, frame=frame, **_but(options, "run", "frame"))
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


@dataclass(frozen=True)
class TasksArguments:
    """Lists the tasks and the action repeat that each preset gives them."""

    family: Annotated[str | None, Positional, arg(metavar="FAMILY")] = None
    """dmc, atari, gym or toy. Unset: all."""
    imports: Imports = ()
    """Modules imported first, such as the one that registers your environment."""


def tasks_command(args: list[str]) -> None:
    from drq.envs import import_modules, task_names
    from drq.presets import preset_values

    options = tyro.cli(TasksArguments, prog="drq tasks", args=args)
    import_modules(options.imports)
    names = task_names(options.family)
    print(f"{'task':40}  action repeat (from state: none)")
    for task in names:
        planet, dreamer = (preset_values(name, task).env.action_repeat for name in ("planet", "dreamer"))
        both = str(planet) if planet == dreamer else f"{planet} (planet, ablation, cpu), {dreamer} (dreamer)"
        print(f"{task:40}  {both}")


def check_command(args: list[str]) -> None:
    from drq.env_check import CheckArguments, check_environment

    faults = check_environment(tyro.cli(CheckArguments, prog="drq check", args=args))
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    if not faults:
        print("No fault was found.")
    sys.exit(1 if faults else 0)


def doctor_command(args: list[str]) -> None:
    from drq.doctor import main as doctor

    tyro.cli(_no_arguments, prog="drq doctor", description="Checks this machine.", args=args)
    sys.exit(doctor())


def demo_command(args: list[str]) -> None:
    from drq.demo import DemoArguments, demo

    demo(tyro.cli(DemoArguments, prog="drq demo", args=args))


def speed_command(args: list[str]) -> None:
    from drq.speed import SpeedArguments, speed

    speed(tyro.cli(SpeedArguments, prog="drq speed", args=args))


@dataclass(frozen=True)
class ReportArguments:
    """Compares runs with each other and with the published numbers: one page, table or figure."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, folders of them, or CSVs with columns task, seed, env_step, return, system."""
    out: Path | None = None
    """Where to write. Unset: report.<format> in the current folder."""
    format: Literal["html", "csv", "md", "tex", "png"] | None = None
    """A self-contained page, a table (csv, md, tex), or a figure (png). Unset: as the file's name ends, or a page."""


def watch_command(args: list[str]) -> None:
    from drq import report

    report.watch(tyro.cli(report.WatchArguments, prog="drq watch", args=args))


def report_command(args: list[str]) -> None:
    from drq.launch import local_copy
    from drq.report import report

    options = tyro.cli(ReportArguments, prog="drq report", args=args)
    if not options.runs:
        raise UserError("Name at least one folder, such as: drq report runs --out report.html")
    out = options.out or Path(f"report.{options.format or 'html'}")
    for warning in report([local_copy(runs) for runs in options.runs], out, format=options.format):
        print(f"drq: {warning}", file=sys.stderr)
    print(out)


@dataclass(frozen=True)
class SuiteStatusArguments:
    """Shows where the runs of a suite are."""

    dir: Positional[Path]
    """The suite's folder."""


@dataclass(frozen=True)
class CompletionArguments:
    """Prints a script that completes commands, options and tasks."""

    shell: Positional[Literal["bash", "zsh", "fish"]]
    """Which shell reads it."""


def suite_command(args: list[str]) -> None:
    """The paper's experiments."""
    from drq import launch

    verb, rest = (args[0], args[1:]) if args else ("", [])
    if verb == "list":
        tyro.cli(_no_arguments, prog="drq suite list", description="Lists the suites.", args=rest)
        sys.exit(launch.list_suites())
    if verb == "run":
        sys.exit(launch.run_suite(tyro.cli(launch.SuiteRunArguments, prog="drq suite run", args=rest)))
    if verb == "status":
        folder = tyro.cli(SuiteStatusArguments, prog="drq suite status", args=rest).dir
        sys.exit(launch.suite_status(launch.local_copy(folder)))
    if verb == "prune":
        sys.exit(launch.prune_suite(tyro.cli(launch.SuitePruneArguments, prog="drq suite prune", args=rest)))
    usage = "drq suite list | drq suite run NAME|FILE.toml ... | drq suite status DIR | drq suite prune DIR"
    if verb in ("-h", "--help"):
        print(f"usage: {usage}\n\n{suite_command.__doc__} `drq suite run --help` explains its options.")
        return
    raise UserError(f"Say what to do with suites: {usage}")


def completion_command(args: list[str]) -> None:
    from drq import demo, env_check, launch, presets, report, speed
    from drq.completion import options_of, script
    from drq.config import TrainConfig
    from drq.envs import FAMILIES, task_names

    shell = tyro.cli(CompletionArguments, prog="drq completion", args=args).shell
    tasks = [task for name, family in FAMILIES.items() if not family.of_the_users for task in task_names(name)]
    each_agent = (("planet", tasks[0]), ("atari100k", "atari/pong"), ("strong", "atari/pong"))
    settings = {name for preset, task in each_agent for name in options_of(TrainConfig, presets.preset(preset, task))}
    words = {command: ["--help"] for command in COMMANDS} | {
        "demo": options_of(demo.DemoArguments),
        "train": [
            *("--preset", "--agent", "--config"),
            *sorted(settings),
            *tasks,
        ],
        "eval": options_of(EvalArguments),
        "export": options_of(ExportArguments),
        "check": [*options_of(env_check.CheckArguments), *tasks],
        "tasks": options_of(TasksArguments),
        "suite": ["list", "run", "status", "prune", "--yes", *options_of(launch.SuiteRunArguments)],
        "report": options_of(ReportArguments),
        "watch": options_of(report.WatchArguments),
        "speed": options_of(speed.SpeedArguments),
        "completion": ["bash", "zsh", "fish"],
    }
    print(script(shell, words), end="")


def _no_arguments() -> None:
    """Takes no arguments."""


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo_command,
    "train": train_command,
    "eval": eval_command,
    "export": export_command,
    "check": check_command,
    "tasks": tasks_command,
    "suite": suite_command,
    "report": report_command,
    "watch": watch_command,
    "speed": speed_command,
    "doctor": doctor_command,
    "completion": completion_command,
}


def _but(options: object, *names: str) -> dict[str, Any]:
    """Options by their names, which are those of the function that takes them, without some."""
    return {name: value for name, value in vars(options).items() if name not in names}


def _task(args: list[str], default: str | None) -> tuple[str, list[str]]:
    """The task is the first word, if that is no option."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    if default is not None:
        return default, args
    if "-h" in args or "--help" in args:
        return "dmc/walker-walk", args
    raise UserError("Name the task first, such as: drq train dmc/walker-walk --preset planet (`drq tasks` lists them).")


def _take_option(args: list[str], name: str) -> tuple[str | None, list[str]]:
    """An option that other options' defaults depend on, and the rest."""
    for at, word in enumerate(args):
        if word == name:
            if at + 1 == len(args):
                raise UserError(f"{name} needs a value.")
            return args[at + 1], args[:at] + args[at + 2 :]
        if word.startswith(name + "="):
            return word.partition("=")[2], args[:at] + args[at + 1 :]
    return None, args


def _values(args: list[str], *names: str) -> list[str]:
    """The words that follow an option of several values."""
    found: list[str] = []
    for at, word in enumerate(args):
        name, _, value = word.partition("=")
        if name in names:
            found += [value] if value else itertools.takewhile(lambda each: not each.startswith("-"), args[at + 1 :])
    return found


def _refuse_values_of_switches(args: list[str], settings: dict[str, Any]) -> None:
    """Says of `--agent.double false` what to write instead, not that `false` is no option."""
    switches = {f"--{name.replace('_', '-')}" for name, value in settings.items() if isinstance(value, bool)}
    for word, following in itertools.pairwise([*args, ""]):
        name, _, value = word.partition("=")
        if name in switches and (value or following).lower() in ("true", "false"):
            group, dot, own = name.removeprefix("--").rpartition(".")
            raise UserError(f"{name} takes no value: write {name}, or --{group}{dot}no-{own} to switch it off.")


WHOLE_NUMBERS = ConstructorRegistry()
"""Has tyro say of `--steps 1e4` what to write instead, not that int() takes no such literal."""


@WHOLE_NUMBERS.primitive_rule
def _whole_number(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    def read(words: list[str]) -> int:
        try:
            return int(words[0])
        except ValueError:
            raise ValueError(f"{words[0]!r} is no whole number: write its digits alone, as 10_000.") from None

    if kind.type is not int:
        return None
    return PrimitiveConstructorSpec(1, "INT", read, lambda value: type(value) is int, lambda value: [str(value)])


def main(args: list[str] | None = None) -> None:
    """Runs a command; a user's mistake is one sentence and exit code 2."""
    args = sys.argv[1:] if args is None else args
    if isinstance(sys.stdout, io.TextIOWrapper):  # where there is no ±, the numbers around it are still worth reading
        sys.stdout.reconfigure(errors="backslashreplace")
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        sys.exit(0 if args else 2)
    if args[0] == "--version":
        from drq import __version__

        print(__version__)
        return
    name, rest = args[0], args[1:]
    try:
        if name not in COMMANDS:
            meant = did_you_mean(name, COMMANDS)
            raise UserError(f"There is no command {name!r}.{meant} Choose from {', '.join(COMMANDS)}.")
        with WHOLE_NUMBERS:
            COMMANDS[name](rest)
    except UserError as error:
        print(f"drq: {error}", file=sys.stderr)
        if isinstance(error, DeviceLost):
            end_at_once(2)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)  # the reader of a pipe has seen enough
    except OSError as error:  # a full disk, a folder that is not ours
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        remedy = "see that its folder is there, that there is room and that it may be written"
        print(f"drq: {what}: {remedy}.", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        from drq.engine import in_words, lacks_memory

        if (happened := in_words(error)) is None:
            raise
        print(f"drq: {happened}: try again when the device is free, or see drq doctor.", file=sys.stderr)
        if not lacks_memory(error):
            end_at_once(2)
        sys.exit(2)
