"""The paper's suites as they are declared, and suites of the user's own."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec

from drq.config import AgentConfig, DQNConfig, RainbowConfig, SACConfig, TrainConfig, check
from drq.envs.atari_games import GAMES_26
from drq.errors import UserError
from drq.launch import list_suites
from drq.presets import PRESETS, action_repeat_for, preset
from drq.suites import SUITES, Suite, find_suite, slug
from drq.suites.file import read_suite

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

# tasks, settings, seeds and budget: what the paper says, or docs/suites.md where it is silent
PAPER = {
    "planet": (6, 1, 10, 500_000),
    "dreamer": (15, 1, 10, 1_000_000),
    "atari100k": (26, 2, 5, 100_000),
    "encoders": (3, 10, 10, 500_000),
    "versions": (3, 4, 10, 500_000),
    "augmentations": (3, 6, 10, 500_000),
    "km": (3, 9, 10, 500_000),
    "robustness": (3, 48, 3, 500_000),
    "data-efficiency": (3, 4, 10, 100_000),
    "frozen-encoder": (3, 3, 10, 500_000),
    "state": (6, 1, 10, 500_000),
}


def configs(name: str) -> dict[str, TrainConfig]:
    """One configuration for each label, of the suite's first task and seed."""
    suite = SUITES[name]
    first = [run for run in suite.runs() if (run.task, run.seed) == (suite.tasks[0], suite.seeds[0])]
    return {run.label: suite.config(run, Path("runs")) for run in first}


def sac(config: TrainConfig) -> SACConfig:
    assert isinstance(config.agent, SACConfig)
    return config.agent


@pytest.mark.parametrize("name", PAPER)
def test_size(name: str) -> None:
    suite = SUITES[name]
    assert (len(suite.tasks), len(suite.settings), len(suite.seeds), suite.steps) == PAPER[name]
    tasks, settings, seeds, _ = PAPER[name]
    assert suite.seeds == tuple(range(1, seeds + 1))
    assert len(set(suite.runs())) == tasks * settings * seeds


def test_nothing_is_missing() -> None:
    assert set(SUITES) == set(PAPER)
    assert [find_suite(name) for name in PAPER] == list(SUITES.values())


@pytest.mark.parametrize("name", PAPER)
def test_every_run_has_a_configuration_and_a_folder_of_its_own(name: str) -> None:
    suite = SUITES[name]
    made = [suite.config(run, Path("runs")) for run in suite.runs()]
    for run, config in zip(suite.runs(), made, strict=True):
        assert (config.task, config.seed, config.steps) == (run.task, run.seed, run.steps)
        assert config.dir == str(Path("runs", slug(run.task), slug(run.label), f"seed-{run.seed}"))
    assert len({config.dir for config in made}) == len(made)
    assert len({dataclasses.replace(config, dir=None) for config in made}) == len(made)


def letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


@pytest.mark.parametrize(
    ("name", "file", "column"),
    [
        ("planet", "drq_planet_mean.csv", "task"),
        ("dreamer", "drq_dreamer_mean.csv", "task"),
        ("atari100k", "paper_atari_table.csv", "game"),
    ],
)
def test_benchmarks_have_the_published_tasks(name: str, file: str, column: str) -> None:
    text = resources.files("drq.report").joinpath("published", file).read_text()
    published = {letters(row[column]) for row in csv.DictReader(text.splitlines())}
    assert {letters(task.partition("/")[2]) for task in SUITES[name].tasks} == published


def test_main_results_have_the_papers_batch_and_ablations_theirs() -> None:
    batches = {name: {config.agent.batch_size for config in configs(name).values()} for name in PAPER}
    assert batches["planet"] == batches["dreamer"] == {512}
    for ablation in ("encoders", "versions", "augmentations", "km", "frozen-encoder"):
        assert batches[ablation] == {128}
    assert batches["robustness"] == {128, 256, 512}


def test_planet_and_dreamer_differ_in_their_action_repeats() -> None:
    def repeats(name: str) -> set[int]:
        return {action_repeat_for(SUITES[name].config(run, Path())) for run in SUITES[name].runs()}

    assert repeats("planet") == {2, 4, 8}
    assert repeats("dreamer") == {2}


def test_views_are_as_labelled() -> None:
    for name in ("versions", "km"):
        for label, config in configs(name).items():
            agent = sac(config)
            if label != "SAC":
                assert (label, agent.augmentation) == (f"K={agent.k} M={agent.m}", "shift")
    versions, grid = ([(sac(each).k, sac(each).m) for each in configs(name).values()] for name in ("versions", "km"))
    assert versions == [(1, 1), (1, 1), (2, 1), (2, 2)]
    assert sorted(grid) == [(k, m) for k in (1, 2, 4) for m in (1, 2, 4)]
    plain = sac(configs("versions")["SAC"])
    assert (plain.augmentation, plain.k, plain.m) == ("none", 1, 1)


def test_encoders_are_as_labelled() -> None:
    made = configs("encoders")
    assert {sac(config).encoder for config in made.values()} == {"sac-ae", "nature", "dreamer", "impala", "d4pg"}
    for label, config in made.items():
        agent = sac(config)
        title, _, augmentation = label.partition(", ")
        assert title.lower() == agent.encoder
        assert augmentation == {"none": "no augmentation", "shift": "random shift"}[agent.augmentation]
        assert agent.k == agent.m == 1


def test_augmentations_are_the_papers_six() -> None:
    made = {sac(config).augmentation for config in configs("augmentations").values()}
    assert made == {"shift", "cutout", "hflip", "vflip", "rotate", "intensity"}


def test_robustness_is_the_papers_grid() -> None:
    for label, config in configs("robustness").items():
        agent = sac(config)
        batch, rate, temperature = re.findall(r"[\d.e-]+$", label.replace(",", "\n"), re.MULTILINE)
        assert (agent.batch_size, agent.learning_rate, agent.init_temperature) == (
            int(batch),
            float(rate),
            float(temperature),
        )
        assert agent.learning_rate in (0.0001, 0.0005, 0.001, 0.005)
        assert agent.init_temperature in (0.005, 0.01, 0.05, 0.1)
        assert (agent.k, agent.m) == (2, 2)


def test_data_efficiency_compares_equally_many_transitions() -> None:
    made = {label: sac(config) for label, config in configs("data-efficiency").items()}
    assert {agent.updates_per_step * agent.batch_size for agent in made.values()} == {512}
    assert {(agent.augmentation, agent.updates_per_step) for agent in made.values()} == {
        ("none", 1), ("none", 4), ("shift", 1), ("shift", 4),
    }  # fmt: skip


def test_only_the_frozen_encoder_is_frozen() -> None:
    frozen = {label: sac(config).freeze_encoder for label, config in configs("frozen-encoder").items()}
    assert frozen == {"DrQ, frozen encoder": True, "SAC, trained encoder": False, "DrQ, trained encoder": False}


def test_state_and_atari() -> None:
    state = configs("state")["SAC State"]
    assert (state.env.observation, sac(state).k, sac(state).m) == ("state", 1, 1)
    # What the authors' repository of SAC from state says, as its two files spell it.
    theirs = {
        "batch_size": 1024, "discount": 0.99, "tau": 0.005, "target_every": 2, "actor_every": 1, "learning_rate": 1e-4,
        "init_temperature": 0.1, "hidden_dim": 1024, "log_std_min": -5, "log_std_max": 2, "seed_steps": 5000,
        "target_entropy": None, "updates_per_step": 1, "n_step": 1,
    }  # fmt: skip
    assert {name: getattr(state.agent, name) for name in theirs} == theirs
    suite = SUITES["state"]
    assert {suite.config(run, Path("runs")).env.action_repeat for run in suite.runs()} == {1}
    assert (state.replay.capacity, state.env.frame_stack) == (None, 1)
    assert (state.eval.every, state.eval.episodes) == (10_000, 10)
    drq, plain = configs("atari100k")["Eff. DQN+DrQ"], configs("atari100k")["Eff. DQN"]
    assert isinstance(drq.agent, DQNConfig)
    assert dataclasses.replace(drq.agent, augmentation="none") == plain.agent
    assert drq.agent.augmentation == "shift+intensity"


def test_the_list_names_every_suite_with_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    list_suites()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    listed = {row[0]: row[-2:] for row in rows if row[0]}
    assert list(listed) == list(SUITES)
    assert listed["robustness"] == ["432", "216M"]
    assert listed["atari100k"] == ["260", "104M"]  # 4 frames an agent step


def test_tasks_are_found_however_they_are_written() -> None:
    names = ["cartpole-swingup", "dmc/cheetah-run", "ball-in-cup-catch", "Walker_Walk", "walker-walk"]
    found = SUITES["planet"].narrowed(tasks=names).tasks
    assert found == ("dmc/cartpole-swingup", "dmc/cheetah-run", "dmc/ball_in_cup-catch", "dmc/walker-walk")
    assert SUITES["atari100k"].narrowed(tasks=["MsPacman", "atari/pong"]).tasks == ("atari/ms_pacman", "atari/pong")
    assert SUITES["versions"].narrowed(tasks=["reacher-easy"]).tasks == ("dmc/reacher-easy",)


def test_narrowing_keeps_the_rest() -> None:
    suite = SUITES["km"].narrowed(seeds=2, steps=1000)
    assert (suite.seeds, suite.steps, suite.tasks) == ((1, 2), 1000, SUITES["km"].tasks)
    assert {run.steps for run in suite.runs()} == {1000}
    seeds = SUITES["km"].narrowed(seeds="4-7")
    assert (seeds.seeds, seeds.steps) == ((4, 5, 6, 7), SUITES["km"].steps)
    assert SUITES["km"].narrowed(steps=1).steps == 1
    assert len(SUITES["km"].narrowed(seeds=10_000).seeds) == 10_000
    assert SUITES["km"].narrowed(seeds="0-0").seeds == (0,)


def test_settings_are_found_by_their_labels_and_their_folders() -> None:
    suite = SUITES["versions"]
    assert suite.narrowed(settings=["k2-m2", "SAC", "sac"]).settings == (suite.settings[0], suite.settings[3])
    assert suite.narrowed(settings=["K=2 M=1"]).settings == (suite.settings[2],)
    for other in SUITES.values():
        assert other.narrowed(settings=[slug(each.label) for each in other.settings]).settings == other.settings


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: find_suite("plant"), "Did you mean 'planet'"),
        (lambda: SUITES["planet"].narrowed(tasks=["cheeta-run"]), "dmc/cheetah-run"),
        (lambda: SUITES["planet"].narrowed(tasks=["dmc/cheetah-runs"]), "dmc/cheetah-run"),
        (lambda: SUITES["planet"].narrowed(seeds=0), "--seeds is 0: say how many, 1 to 10,000, as in --seeds 3, or"),
        (lambda: SUITES["planet"].narrowed(seeds=-1), "--seeds is -1: say how many"),
        (lambda: SUITES["planet"].narrowed(seeds="7-4"), "--seeds is 7-4: say how many"),
        (lambda: SUITES["planet"].narrowed(seeds="1,2"), "which, as in --seeds 4-7."),
        (lambda: SUITES["planet"].narrowed(seeds="1-10001"), "--seeds is 1-10001: say how many, 1 to 10,000"),
        (lambda: SUITES["versions"].narrowed(settings=["k2m2"]), "no setting 'k2m2'. Did you mean 'k2-m2'"),
        (lambda: SUITES["planet"].narrowed(steps=0), "--steps is 0: set it to 1 or more"),
        (lambda: find_suite("nowhere.toml"), "nowhere.toml cannot be read"),
    ],
)
def test_mistakes_are_said(call: Callable[[], Suite], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        call()


GOOD = """
name = "mine"
shows = "what pad does"
preset = "ablation"
tasks = ["walker-walk", "dmc/cheetah-run"]
seeds = [3, 5]
steps = 20_000

[common]
"agent.batch_size" = 64

[[settings]]
label = "K=1 M=1"
"agent.k" = 1
agent.m = 1

[[settings]]
label = "pad 8, lr 1e-4"
"agent.pad" = 8
agent.learning-rate = 1e-4
env.action-repeat = 2
"""


def read(tmp_path: Path, text: str) -> Suite:
    path = tmp_path / "my_suite.toml"
    path.write_text(text)
    return read_suite(path, ["no_such_module_here"])


def test_a_file_is_read_as_it_says(tmp_path: Path) -> None:
    suite = read(tmp_path, GOOD)
    assert (suite.name, suite.shows, suite.preset) == ("mine", "what pad does", "ablation")
    assert suite.tasks == ("dmc/walker-walk", "dmc/cheetah-run")
    assert (suite.seeds, suite.steps, len(suite.runs())) == ((3, 5), 20_000, 8)
    made = {run.label: suite.config(run, tmp_path) for run in suite.runs()}
    rad, pad = made["K=1 M=1"], made["pad 8, lr 1e-4"]
    assert (sac(rad).k, sac(rad).m, sac(rad).pad, sac(rad).batch_size) == (1, 1, 4, 64)
    assert (sac(pad).k, sac(pad).pad, sac(pad).learning_rate, pad.env.action_repeat) == (2, 8, 1e-4, 2)


@pytest.mark.parametrize(
    "arguments", ['[common]\n"env.kwargs" = \'{"track": {"length": 3}}\'', "[common.env.kwargs]\ntrack.length = 3"]
)
def test_an_environment_that_takes_arguments(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made with them where its actions are looked at, and an argument may be a table."""

    class Track(CartPoleEnv):
        def __init__(self, track: dict[str, int], render_mode: str | None = None) -> None:
            super().__init__(render_mode=render_mode)
            self.length = track["length"]

    monkeypatch.setitem(gymnasium.registry, "Track-v0", EnvSpec("Track-v0", Track))
    text = f'tasks = ["gym/Track-v0"]\npreset = "cpu"\n{arguments}\n[[settings]]\nlabel = "DQN"\n'
    suite = read(tmp_path, text)
    config = suite.config(suite.runs()[0], tmp_path)
    assert isinstance(config.agent, DQNConfig)
    assert config.env.kwargs == '{"track": {"length": 3}}'


def test_a_seed_may_be_zero(tmp_path: Path) -> None:
    assert read(tmp_path, changed("[3, 5]", "[0, 5]")).seeds == (0, 5)


def test_runs_import_what_their_suite_imports(tmp_path: Path) -> None:
    path = tmp_path / "my_suite.toml"
    path.write_text('imports = ["json"]\n' + GOOD)
    suite = read_suite(path, ["json"])
    assert {suite.config(run, tmp_path).imports for run in suite.runs()} == {("json",)}


def test_what_a_file_leaves_out(tmp_path: Path) -> None:
    suite = read(tmp_path, 'tasks = ["toy/catch"]\n[[settings]]\nlabel = "plain"\n')
    assert (suite.name, suite.preset, suite.seeds, suite.steps) == ("my_suite", "toy", (1,), 3_500)
    assert isinstance(suite.config(suite.runs()[0], tmp_path).agent, DQNConfig)  # catch has discrete actions


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (changed("seeds =", "seedz ="), "There is no key 'seedz'. Did you mean 'seeds'?"),
        (changed('"agent.k"', '"agent.kk"'), "'K=1 M=1': There is no setting 'agent.kk'. Did you mean 'agent.k'"),
        (changed('"agent.pad"', '"paad"'), "Did you mean 'agent.pad'"),
        (changed('"agent.k" = 1', '"agent.k" = "one"'), "'agent.k' is 'one': give it a whole number"),
        (changed('"agent.k" = 1', '"agent.k" = true'), "'agent.k' is True: give it a whole number"),
        (changed('"agent.k" = 1', '"agent.encoder" = "resnet"'), "There is no encoder 'resnet'. Choose from sac-ae"),
        (changed('"agent.k" = 1', '"agent.augmentation" = "shfit"'), "Did you mean 'shift'"),
        (changed('"agent.k" = 1', '"agent.k" = 0'), "--agent.k is 0"),
        (changed('"agent.k" = 1', '"seed" = 1'), "say it with `seeds`"),
        (changed("1e-4\nenv", '"fast"\nenv'), "is 'fast': give it a number."),
        (changed("walker-walk", "waker-walk"), "Did you mean 'dmc/walker-walk'"),
        (changed("dmc/cheetah-run", "walker_walk"), "The task 'dmc/walker-walk' is there twice"),
        (changed('"dmc/cheetah-run"', "7"), "`tasks` is ['walker-walk', 7]: give it a list of texts"),
        (changed('tasks = ["walker-walk", "dmc/cheetah-run"]', ""), "`tasks` is missing"),
        (changed('tasks = ["walker-walk", "dmc/cheetah-run"]', ""), 'such as tasks = ["walker-walk", "cheetah-run"].'),
        (f"imports = 3\n{GOOD}", '`imports` is 3: give it a list of texts, such as imports = ["my_module"]'),
        (changed("pad 8, lr 1e-4", "K=1 M=1"), "The label 'K=1 M=1' is there twice"),
        (changed("pad 8, lr 1e-4", "k1 / m1"), "give the same folder (k1-m1)"),
        (changed('label = "K=1 M=1"', ""), "Setting 1 has no label"),
        (changed('label = "K=1 M=1"', 'label = "?"'), "Setting 1 has no label"),
        (changed("[3, 5]", "0"), "`seeds` is 0"),
        (changed("[3, 5]", "[3, 3]"), "The seed 3 is there twice"),
        (changed("[3, 5]", "[3, -1]"), "`seeds` is [3, -1]"),
        (changed("20_000", '"many"'), "`steps` is 'many': give it a whole number above 0"),
        (changed('"ablation"', '"ablatoin"'), "Did you mean 'ablation'"),
        (changed('"mine"', "5"), "`name` is 5: give it a text"),
        (changed('"mine"', '"?"'), "no letter or digit"),
        (changed("seeds = [3, 5]", "seeds = "), "is not valid TOML"),
        (GOOD[: GOOD.index("[[settings]]")], "`settings` is missing"),
        (f"settings = [1]\n{GOOD[: GOOD.index('[[settings]]')]}", "`settings` is missing or no list of tables"),
        (GOOD.replace("[common]", "[[common]]"), "`common` is no table"),
        (f'imports = ["no_such_module_here"]\n{GOOD}', "There is no module 'no_such_module_here'"),
    ],
)
def test_mistakes_in_a_file_are_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        read(tmp_path, text)
    assert "my_suite.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_suite_of_the_benchmark_is_sixteen_runs(tmp_path: Path) -> None:
    suite = find_suite(str(BENCHMARKS / "pong16.toml"))
    configs = [suite.config(run, tmp_path) for run in suite.runs()]
    assert [(config.task, config.preset) for config in configs] == [("atari/pong", "atari100k")] * 16
    assert {config.seed for config in configs} == set(range(1, 17))


def test_the_suite_of_the_atari_table_is_every_game_twice(tmp_path: Path) -> None:
    suite = find_suite(str(BENCHMARKS / "atari26-eps.toml"))
    configs = [suite.config(run, tmp_path) for run in suite.runs()]
    assert sorted(config.task for config in configs[:26]) == [f"atari/{game}" for game in sorted(GAMES_26)]
    assert [config.seed for config in configs] == [1] * 26 + [2] * 26
    for config in configs:
        eps = preset("atari100k-eps", config.task)
        same = dataclasses.replace(config, seed=eps.seed, dir=None, eval=eps.eval)
        assert (same, config.eval.episodes, config.eval.video) == (eps, 100, False)


@pytest.mark.parametrize("name", [file.name for file in BENCHMARKS.glob("*.toml")])
def test_every_suite_of_the_benchmarks_can_be_run(name: str, tmp_path: Path) -> None:
    suite = find_suite(str(BENCHMARKS / name))
    configs = [suite.config(run, tmp_path) for run in suite.runs()]
    for config in configs:
        check(config)
        assert config.preset in PRESETS
    assert len({config.dir for config in configs}) == len(configs)


def test_the_suites_of_the_strong_agent_differ_in_what_they_compare(tmp_path: Path) -> None:
    def agents(name: str) -> dict[str, list[AgentConfig]]:
        suite = find_suite(str(BENCHMARKS / name))
        by_game: dict[str, list[AgentConfig]] = {}
        for run in suite.runs():
            config = suite.config(run, tmp_path)
            by_game.setdefault(config.task, []).append(config.agent)
        return by_game

    strong = RainbowConfig()
    twelve = agents("strong12.toml")
    assert len(twelve) == 12
    assert set(twelve) <= {f"atari/{game}" for game in GAMES_26}
    assert all(found == [strong] for found in twelve.values())
    priorities, views = agents("strong-priorities.toml"), agents("strong-views.toml")
    assert len(priorities) == len(views) == 3
    assert set(priorities) == set(views) <= set(twelve)
    assert all(found == [strong, dataclasses.replace(strong, prioritised=False)] for found in priorities.values())
    assert all(found == [dataclasses.replace(strong, k=2, m=2)] for found in views.values())


def test_the_suite_of_falling_walkers_goes_on_from_the_ablation(tmp_path: Path) -> None:
    """Its settings are those of `versions` to the letter, with other seeds; TF32 is but another way to compute them."""
    falls, versions = find_suite(str(BENCHMARKS / "walker-falls.toml")), SUITES["versions"]

    def configs(suite: Suite, label: str) -> dict[int, TrainConfig]:
        runs = [run for run in suite.runs() if (run.task, run.label) == ("dmc/walker-walk", label)]
        return {run.seed: suite.config(run, tmp_path) for run in runs}

    for label, of_versions, precision in (
        ("K=2 M=2", "K=2 M=2", "auto"),
        ("K=2 M=2, TF32", "K=2 M=2", "tf32"),
        ("K=1 M=1", "K=1 M=1", "auto"),
    ):
        there, here = configs(versions, of_versions)[1], configs(falls, label)
        assert set(here) == {3, 4, 5, 6, 7, 8}
        assert {config.engine.precision for config in here.values()} == {precision}
        for config in here.values():
            assert (config.agent, config.env, config.replay) == (there.agent, there.env, there.replay)


def test_the_example_of_the_documentation_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "suites.md").read_text()
    example, _ = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    suite = read(tmp_path, example)
    pads = {run.label: sac(suite.config(run, tmp_path)).pad for run in suite.runs()}
    assert pads == {"pad 2": 2, "pad 8, K=1 M=1": 8}
    for listed in SUITES.values():
        parts = " x ".join(map(str, PAPER[listed.name][:3]))
        assert re.search(rf"\| `{listed.name}` \|.*\| {parts} \|.*\| {listed.preset} \|", page)
