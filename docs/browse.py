"""Opens every page of the built site in Chromium, as a reader would; `make test-docs` runs it.

Fails if a page logs an error, an image does not load, the search misses a page, or a page is wider
than a phone.
"""

import argparse
import contextlib
import functools
import http.server
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

PHONE = {"width": 400, "height": 800}
# Without the last three, Chromium contacts its maker's servers.
OPTIONS = ["--no-sandbox", "--disable-background-networking", "--disable-sync", "--no-first-run"]
NOT_LOADED = (
    "() => [...document.images].filter(x => !x.complete || !x.naturalWidth).map(x => x.src)"
)
# Elements that scroll on their own, such as code and wide tables, may be wider than the page.
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="the folder that `make docs` has written")
    site = parser.parse_args().site
    pages = sorted(x.relative_to(site).as_posix() for x in site.rglob("*.html"))
    pages = [page for page in pages if not page.startswith("_static/")]
    if "index.html" not in pages:
        parser.error(
            f"{site} is not the folder of a built site: it has no index.html. Run `make docs`."
        )
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=OPTIONS)
        wrong = [x for page in pages for x in problems(browser, address, page)]
        wrong += search_problems(browser, address)
        browser.close()
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(f"{len(pages)} pages opened: no errors, all images load, search works, fit a phone")
    return 1 if wrong else 0


def problems(browser: Browser, address: str, name: str) -> list[str]:
    """Returns a page's problems on a wide screen and on a phone."""
    problems = []
    with opened(browser) as (page, errors):
        page.goto(f"{address}/{name}", wait_until="load")
        problems += [f"{name}: {error}" for error in errors]
        problems += [
            f"{name}: the picture {source} does not load" for source in page.evaluate(NOT_LOADED)
        ]
        page.set_viewport_size(PHONE)
        if (pixels := page.evaluate(TOO_WIDE)) > 0:
            problems.append(f"{name}: {pixels} pixels wider than a phone of {PHONE['width']}")
    return problems


def search_problems(browser: Browser, address: str) -> list[str]:
    """Returns an error message for each page that a search for its topic does not find."""
    with opened(browser) as (page, errors):
        page.goto(f"{address}/search.html?q=staleness", wait_until="load")
        page.wait_for_selector(
            "ul.search li, .search-summary:has-text('did not match')", timeout=20_000
        )
        links = page.locator("ul.search a").all()
        addresses = {re.split("[?#]", link.get_attribute("href") or "")[0] for link in links}
        lacking = {"design.html", "how_it_works.html"} - addresses
        return [f"search.html: {x}" for x in errors] + [
            f"search.html: 'staleness' does not lead to {name}" for name in sorted(lacking)
        ]


@contextlib.contextmanager
def opened(browser: Browser) -> Iterator[tuple[Page, list[str]]]:
    """Yields a new tab and the list of errors that it logs."""
    page, errors = browser.new_page(viewport={"width": 1280, "height": 900}), []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page, errors
    page.close()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine only, and yields its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def chromium() -> str:
    """Returns the path to Chromium: the variable CHROMIUM, or a program in PATH."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise SystemExit(
            f"none of {', '.join(names)} is in PATH. Install Debian's package "
            "`chromium`, or set CHROMIUM to the path of the browser."
        )
    return path


if __name__ == "__main__":
    sys.exit(main())
