"""Drives the page of a running `larder serve` in a real Chromium, and takes screenshots.

    pip install playwright axe-playwright-python
    larder serve -m models/demo --cache 8x --context 2048
    python scripts/check/test_page.py --url http://127.0.0.1:8080 --pictures docs

    cp -r models/demo /tmp/twin
    larder serve -m demo=models/demo -m twin=/tmp/twin --cache 8x --context 2048 --unload-after 0 --port 8081
    python scripts/check/test_page.py --two-models http://127.0.0.1:8081    # the checks of several models alone; also with --lock-routing

The checks are in the folder page: sending, stopping and streaming, turns beyond the context, conversations that are kept, versions of
messages, files, two tabs, λ with its cost and the grid, hostile markdown, light and dark, colours of code, formulas, a key, narrow screens, the keyboard alone, and axe on each view.
Any error in the browser's console fails. Prints `ok` for each check; exits with 1 if one fails.
"""

import argparse
import pathlib
import tempfile

from playwright.sync_api import sync_playwright

from page import branches, chat, conversations, engine, models, panel, pictures, reading, views
from page.browser import Page

CHECKS = (
    chat.chat, chat.keyboard, chat.context, chat.beyond_the_context, conversations.reload, branches.branches, branches.copies,
    conversations.side_bar, conversations.background, conversations.files, conversations.two_tabs, conversations.a_tab_that_is_closed,
    conversations.nothing_kept, conversations.full_disk, engine.panel, engine.lambda_slider, panel.lambda_cost, panel.lambda_warning,
    panel.lambda_lock, panel.locked_server, panel.chat_experts, panel.lines, chat.markdown, views.phone,
    reading.theme, reading.theme_against_the_system, reading.theme_without_storage, reading.code,
    reading.code_that_grows, reading.formulas, reading.formulas_that_grow, reading.formulas_of_a_hostile_server, views.keyboard_alone, views.axe, engine.many_experts, chat.key, chat.lost,
)
TWO_MODELS = (models.choice, models.panel, models.waiting, models.another_server)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--two-models", metavar="URL", help="a server of the models demo and twin, in place of --url")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--pictures", type=pathlib.Path, help="folder for the screenshots of the docs")
    parser.add_argument("checks", nargs="*", help="names of checks (default: all)")
    args = parser.parse_args()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        for check in TWO_MODELS if args.two_models else CHECKS:
            if args.checks and check.__name__ not in args.checks:
                continue
            with Page(browser, args.two_models or args.url) as page:
                check(page, pathlib.Path(folder)) if check is conversations.files else check(page)
            print(f"ok {check.__name__}", flush=True)
        if args.pictures:
            take_pictures(browser, args)
        browser.close()


def take_pictures(browser, args):
    for scheme in ("light", "dark"):
        # So high that the panel is seen to its end.
        with Page(browser, args.url, color_scheme=scheme, viewport={"width": 1280, "height": 920}) as page:
            pictures.take(page, args.pictures, scheme)
    with Page(browser, args.url) as page:
        pictures.conversations(page, args.pictures)


if __name__ == "__main__":
    main()
