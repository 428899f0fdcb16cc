"""The HTML report in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner import Plan
from planner.instance import Instance
from planner.orders import lazy_order
from planner.problem import Problem, Solution
from planner.report_page import page
from planner.summary import summarise
from tests.browser import chromium, opened
from tracer.graph import ComputationGraph, Kind, Operation, Phase, Value

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>&amp;'\\u2028"


def layered(layers: int, inside: int, name: str = "layer") -> ComputationGraph:
    """A chain of layers, each of some modules with two operations, forward and backward."""
    values = [Value(0, "input", 4096, Kind.RESIDENT, None, (8, 128), "float32")]
    operations: list[Operation] = []

    def add(target: str, phase: Phase, reads: tuple[int, ...], nbytes: int, module: str) -> int:
        index, made = len(operations), len(values)
        kind = Kind.ACTIVATION if phase is Phase.FORWARD else Kind.TEMPORARY
        label = f"{target}_{index}"
        values.append(Value(made, label, nbytes, kind, index, (8, nbytes // 32), "float32"))
        operations.append(
            Operation(
                *(index, label, f"aten.{target}.default", phase, reads, (made,)),
                *(10_000 * (1 + index % 7), 64, phase is Phase.FORWARD, None, module),
                f"/home/someone/models/net.py:{index % 90}",
            )
        )
        return made

    made = [0]
    modules = [f"net.{name}.{i}.part{j % inside}" for i in range(layers) for j in range(2 * inside)]
    for n, module in enumerate(modules):
        target = "mm" if n % 2 else "gelu"
        made.append(add(target, Phase.FORWARD, (made[-1],), 32768 << n % 3, module))
    gradient = made[-1]
    for n in range(len(modules) - 1, -1, -1):
        reads = (gradient, made[n])
        gradient = add("mul", Phase.BACKWARD, reads, 32768, modules[n])
    return ComputationGraph(tuple(operations), tuple(values), (("parameters", 1 << 20),))


def planned(graph: ComputationGraph, every: int = 4, device: str = "a device") -> Plan:
    """A plan that keeps every so many of the forward values and makes the others again."""
    instance = Instance(Problem(graph, 0))
    order = tuple(lazy_order(instance, list(graph.candidates)[::every]))
    return summarise(
        Problem(graph, instance.peak(order)),
        Solution(order),
        minimum_bytes=graph.fixed,
        floor=0,
        solver="by hand",
        seconds=0.1,
        device=device,
        notes=(f"a note {HOSTILE}",),
        engine=None,
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def small() -> Plan:
    made = planned(layered(4, 3))
    assert len(made.cuts) > 3 and made.recomputed
    return made


def column(browser: Any, number: int) -> list[str]:
    script = f"return [...document.querySelectorAll('#cuts tbody td:nth-child({number})')]"
    return list(browser.execute_script(script + ".map(td => td.textContent)"))


def press(browser: Any, selector: str) -> None:
    """As the keyboard does: focus, then Enter."""
    from selenium.webdriver.common.keys import Keys

    browser.find_element("css selector", selector).send_keys(Keys.ENTER)


def test_the_page_renders_without_a_complaint(browser: Any, small: Plan, tmp_path: Path) -> None:
    small.report(tmp_path / "plan.html")
    opened(browser, tmp_path / "plan.html")
    assert browser.get_log("browser") == []
    shown = browser.find_element("css selector", "main").text
    for words in (
        "Memory over the step",
        "budget",
        "Memory against time",
        "Cut points",
        "no recomputation",
    ):
        assert words.lower() in shown.lower()
    paths = browser.execute_script("return document.querySelectorAll('#memory path').length")
    assert paths == 2  # with the plan and without
    assert len(column(browser, 1)) == len(small.cuts)
    moment = browser.find_element("id", "moment-text").text
    assert f"{max(e.bytes for e in small.timeline) / 1e6:.2f} MB held" in moment


def test_the_page_sorts_and_filters(browser: Any, small: Plan, tmp_path: Path) -> None:
    small.report(tmp_path / "plan.html")
    opened(browser, tmp_path / "plan.html")
    assert column(browser, 1) == [c.name for c in small.cuts]  # the weightiest first
    press(browser, "#cuts th:nth-child(5) button")
    sizes = [float(t) for t in column(browser, 5)]
    assert sizes == sorted(sizes, reverse=True)
    press(browser, "#cuts th:nth-child(5) button")
    assert [float(t) for t in column(browser, 5)] == sorted(sizes)
    th = browser.find_element("css selector", "#cuts th:nth-child(5)")
    assert th.get_attribute("aria-sort") == "ascending"
    module = small.cuts[0].module
    browser.find_element("id", "filter").send_keys(module)
    wanted = [c for c in small.cuts if module in c.module]
    assert len(column(browser, 1)) == len(wanted) < len(small.cuts)
    assert f"{len(wanted)} of {len(wanted)} shown" in browser.find_element("id", "cut-count").text
    assert browser.get_log("browser") == []


def test_trees_open_and_close_by_keyboard(browser: Any, small: Plan, tmp_path: Path) -> None:
    small.report(tmp_path / "plan.html")
    opened(browser, tmp_path / "plan.html")
    count = "return document.querySelectorAll('#{} tbody tr').length"
    for table, open_all in (("modules", "#modules-open"), ("graph", "#graph-more")):
        before = browser.execute_script(count.format(table))
        press(browser, f"#{table} tbody button")
        after = browser.execute_script(count.format(table))
        assert after != before
        label = "return document.activeElement.getAttribute('aria-expanded')"
        assert browser.execute_script(label) in ("true", "false")  # focus stays where it was
        press(browser, open_all)
        assert browser.execute_script(count.format(table)) > before
    arcs = browser.execute_script("return document.querySelectorAll('#arcs path').length")
    assert arcs > 0
    assert browser.get_log("browser") == []


def test_both_schemes_can_be_read(browser: Any, small: Plan, tmp_path: Path) -> None:
    small.report(tmp_path / "plan.html")
    opened(browser, tmp_path / "plan.html")
    colours = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    seen = []
    for _ in range(2):
        ink, paper = (_luminance(c) for c in browser.execute_script(colours))
        lighter, darker = max(ink, paper), min(ink, paper)
        assert (lighter + 0.05) / (darker + 0.05) > 7  # WCAG's contrast for small text, AAA
        seen.append(ink < paper)
        press(browser, "#theme")
    assert set(seen) == {True, False}


def _luminance(colour: str) -> float:
    channels = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_hostile_names_stay_text(browser: Any, tmp_path: Path) -> None:
    made = planned(layered(2, 2, HOSTILE), device=HOSTILE)
    made.report(tmp_path / "plan.html")
    opened(browser, tmp_path / "plan.html")
    press(browser, "#modules-open")
    press(browser, "#graph-more")
    assert browser.title == f"Checkpoint plan for {HOSTILE}"
    assert browser.execute_script("return document.querySelectorAll('img, b').length") == 0
    assert any(HOSTILE in text for text in column(browser, 2))
    assert browser.get_log("browser") == []


def test_a_model_of_a_hundred_layers(browser: Any, tmp_path: Path) -> None:
    """How long it took is in `data-ready`; `benchmarks/report_page.py` prints it."""
    made = planned(layered(100, 10))
    assert len(made.graph.operations) == 4000
    path = tmp_path / "plan.html"
    made.report(path)
    assert path.stat().st_size < 5_000_000
    opened(browser, path)
    browser.find_element("id", "filter").send_keys("net.layer.99.")
    found = column(browser, 2)
    assert found and all("net.layer.99." in m for m in found)
    press(browser, "#graph tbody button")
    assert browser.get_log("browser") == []


def test_nothing_is_loaded_from_elsewhere(small: Plan) -> None:
    text = page(small)
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    assert "url(" not in text and "import(" not in text and "fetch(" not in text
    assert "default-src 'none'" in text


def test_a_notebook_shows_the_page(browser: Any, small: Plan, tmp_path: Path) -> None:
    outer = tmp_path / "notebook.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8>{small._repr_html_()}")
    browser.get(outer.as_uri())
    browser.switch_to.frame(0)
    assert browser.execute_script("return document.documentElement.dataset.ready") is not None
    assert len(column(browser, 1)) == len(small.cuts)
    browser.switch_to.default_content()
