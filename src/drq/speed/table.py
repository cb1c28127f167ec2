"""The report of `drq speed` as text for one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drq.speed.results import SpeedReport, UpdateSpeed


def table(report: SpeedReport) -> str:
    """All that was measured, with what it means."""
    parts = (_head, _presets, _comparisons, _growth, _processes, _environments, _rest)
    texts = ["\n".join(line.rstrip() for line in part(report)) for part in parts]
    return "\n\n".join(filter(None, texts)) + "\n"


def _head(report: SpeedReport) -> Iterator[str]:
    m = report.machine
    yield f"{m['device']}; {m['cpu']}, {m['cores']} cores; PyTorch {m['torch']}; drq {m['drq']}"
    yield f"engine: {report.engine}. Times are medians, after a warm-up, on random images."


def _presets(report: SpeedReport) -> Iterator[str]:
    yield from _aligned(
        ["updates", "batch", "K", "M", "ms", "updates/s", "GPU memory", "host memory", "ready in"],
        [
            [
                speed.name,
                str(speed.batch_size),
                str(speed.k),
                str(speed.m),
                _number(speed.timing.ms),
                _number(speed.timing.per_second),
                _size(speed.device_bytes),
                _size(speed.host_bytes),
                f"{speed.ready_seconds:.0f} s",
            ]
            for speed in report.presets
        ],
    )


def _comparisons(report: SpeedReport) -> Iterator[str]:
    for found in report.comparisons:
        yield (
            f"drq and a plain implementation, in turns in one process: batch {found.batch_size}, "
            f"K = {found.k}, M = {found.m}"
        )
        rows = []
        for place, each in enumerate(found.contenders):
            ratios = [f"{_number(each.ratio)} x", " to ".join(map(_number, each.ratio_range))] if place else ["1", ""]
            rows.append([each.name, _number(each.timing.ms), _number(each.timing.per_second), *ratios])
        yield from _aligned(["", "ms", "updates/s", "times as long", "in single turns"], rows)


def _growth(report: SpeedReport) -> Iterator[str]:
    if not report.growth:
        return
    yield f"how an update's time and memory grow with one setting, the rest as in {report.growth_from}"

    def cell(speed: UpdateSpeed) -> str:
        size = speed.device_bytes if speed.device_bytes is not None else speed.host_bytes
        return f"{speed.name}: {_number(speed.timing.ms)} ms, {_size(size)}"

    for what, speeds in report.growth.items():
        yield f"  {what:8}" + "".join(f"{cell(speed):27}" for speed in speeds)


def _processes(report: SpeedReport) -> Iterator[str]:
    rows = [
        [
            f"{each.processes} x {each.work}{', MPS' if each.mps else ''}",
            _number(each.updates_per_second),
            _number(each.updates_per_second / each.processes),
            _size(each.device_bytes),
            _size(each.host_bytes_each),
        ]
        for each in report.processes
    ]
    head = ["agents at once, not compiled", "updates/s together", "each", "GPU memory together", "host memory each"]
    yield from _aligned(head, rows)


def _environments(report: SpeedReport) -> Iterator[str]:
    rows = [
        [
            f"{each.task} {each.render}".rstrip(),
            _number(each.agent_steps_per_second),
            _number(each.env_steps_per_second),
            "-" if each.frames_per_second is None else _number(each.frames_per_second),
        ]
        for each in report.environments
    ]
    yield from _aligned(["one environment", "agent steps/s", "env steps/s", "frames/s of the renderer"], rows)
    if rows:
        yield f"  OpenGL, which draws paper and fast: {report.machine['renderer']}"


def _rest(report: SpeedReport) -> Iterator[str]:
    if report.acting:
        times = (f"{_number(each.ms)} ms for {each.observations}" for each in report.acting)
        yield f"acting, observations to actions: {', '.join(times)}"
    if report.host_peak_bytes is not None:
        yield f"host memory of this measurement, at most: {_size(report.host_peak_bytes)}"
    for word, entries in (("left out", report.left_out), ("FAILED", report.failed)):
        for what, why in entries.items():
            yield f"{word}: {what}: {why}"


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right; nothing where there are no rows."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for indent, row in (("", head), *(("  ", row) for row in rows)):
        first = (indent + row[0]).ljust(widths[0] + 2)
        yield first + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))


def _number(value: float) -> str:
    """Three digits or so."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _size(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f} GB"
