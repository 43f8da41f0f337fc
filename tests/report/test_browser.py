"""The report in Chromium: it draws without a word on the console, asks nobody, and answers to pointer and switches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from report.browser import Browser, chromium
from report.recorded import decided, record
from tonnage.report.page import write_report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="no Chromium")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    run = decided(folder)
    record(run, 5000, at7={"loss": None, "skipped": True, "not_finite": "gradient"})
    other = decided(folder, output=str(folder / "other"))
    record(other, 30)
    write_report([run.path, other.path], folder / "both.html")
    return write_report([run.path])


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def told(browser: Browser) -> list[str]:
    found: list[str] = browser.run("[...document.querySelectorAll('.told')].map((one) => one.textContent)")
    return found


def test_it_draws_and_asks_nobody(browser: Browser, page: Path) -> None:
    for path in (page, page.parent.parent / "both.html"):
        browser.requests.clear()
        browser.open(path)
        asked = [url for url in browser.requests if not url.startswith("data:")]
        assert asked == [path.absolute().as_uri()]
        assert browser.run("document.querySelectorAll('figure:not([hidden]) path.curve').length") >= 5
        assert "NaN" not in browser.run("document.querySelector('.charts').innerHTML")
    assert browser.console == []


def test_the_pointer_shows_what_was_measured(browser: Browser, page: Path) -> None:
    browser.resize(1200, 900)
    browser.open(page)
    browser.run("box = document.querySelector('svg').getBoundingClientRect()")
    box = browser.run("[box.x, box.y, box.width, box.height]")
    browser.point(box[0] + box[2] / 2, box[1] + box[3] / 2)
    shown = [text for text in told(browser) if text.startswith("step ")]
    assert len(shown) == 5  # all charts show the same step
    assert len({text.split(" · ")[0] for text in shown}) == 1
    assert abs(int(shown[0].split()[1].replace(",", "")) - 2500) < 200
    assert browser.run("document.querySelectorAll('.cross').length") == 5
    browser.point(5, 5)
    assert not any(text.startswith("step ") for text in told(browser))
    assert browser.console == []


def test_switches_change_what_is_drawn(browser: Browser, page: Path) -> None:
    browser.open(page)
    curve = "document.querySelector('path.curve').getAttribute('d')"
    drawn = {browser.run(curve)}
    for change in ("smoothing').value = 0", "log').checked = true", "axis').value = 'tokens'"):
        form = "document.querySelector('form.controls')"
        script = f"document.querySelector('.{change}; {form}.dispatchEvent(new Event('input'))"
        browser.run(script)
        drawn.add(browser.run(curve))
    assert len(drawn) >= 3  # steps and tokens are proportional here
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.prefer("light")
    light = browser.run(ground)
    browser.prefer("dark")
    dark = browser.run(ground)
    assert light != dark
    browser.run("document.getElementById('theme').click()")
    assert browser.run(ground) == light
    browser.run("document.getElementById('theme').click()")
    assert browser.run(ground) == dark
    assert browser.console == []


def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, page: Path) -> None:
    browser.resize(390, 844)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.run("document.querySelector('svg').getBoundingClientRect().width") <= 390
