"""A page of the server in a browser, with what the checks do to it."""

import json
import time


class Page:
    """A new page; at the end its console must hold no errors or warnings."""

    def __init__(self, browser, url, context=None, **options):
        self.context = context or browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        self.page, self.url, self.messages, self.allowed = self.context.new_page(), url, [], ()
        self.page.on("console", lambda message: self.messages.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", self.requested)

    def another_tab(self):
        """A page of the same browser, with the same storage."""
        return Page(None, self.url, self.context)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.context.close()
        if kind is None:
            wrong = [text for text in self.messages if not any(part in text for part in self.allowed)]
            assert not wrong, wrong

    def requested(self, request):
        if not request.url.startswith((self.url, "data:")):
            self.messages.append(f"a request to {request.url}")

    def open(self, path="/"):
        self.page.request.post(f"{self.url}/engine", data={"lambda": 0})
        self.page.goto(self.url + path)
        self.until("document.querySelector('#state').textContent === 'ready'")
        return self.page

    def until(self, expression, seconds=15):
        """Waits until the expression is true. Playwright's own wait needs eval, which the page's policy forbids."""
        start = time.monotonic()
        while not self.page.evaluate(expression):
            assert time.monotonic() - start < seconds, f"never: {expression}"
            self.page.wait_for_timeout(20)

    def send(self, text, max_tokens=None):
        if max_tokens is not None:
            self.set(max_tokens=max_tokens)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def set(self, **settings):
        if self.page.locator("#settings").is_hidden():
            self.page.click("#settings-button")
        for name, value in settings.items():
            self.page.fill("#" + name.replace("_", "-"), str(value))
        self.page.click("#settings-button")

    def choose(self, id, value):
        """Chooses in a list of the settings."""
        self.page.click("#settings-button")
        self.page.select_option(f"#{id}", value)
        self.page.click("#settings-button")

    def answer(self):
        return self.page.locator(".answer").last

    def wait_until_written(self):
        self.page.wait_for_selector(".answer:last-child:not(.busy) .tools button")

    def wait_until_streaming(self, length=60):
        self.until(f"(document.querySelector('.answer.busy:last-child .text')?.textContent.length ?? 0) > {length}")

    def ask(self, text, max_tokens=24):
        """Sends a message and waits for the whole answer, whose text is returned."""
        self.send(text, max_tokens)
        self.wait_until_written()
        return self.text()

    def text(self):
        return self.answer().locator(".text").inner_text()

    def texts(self):
        return self.page.locator(".message .text").all_inner_texts()

    def titles(self):
        return self.page.locator("#list .title").all_inner_texts()

    def until_titles(self, titles):
        self.until(f"JSON.stringify([...document.querySelectorAll('#list .title')].map((title) => title.textContent)) === {json.dumps(json.dumps(titles, separators=(',', ':'), ensure_ascii=False))}")

    def act(self, title, action):
        """Chooses an action of a conversation's menu."""
        self.page.get_by_role("button", name=f"Actions for {title}", exact=True).click()
        self.page.get_by_role("button", name=action, exact=True).click()

    def copied(self):
        return self.page.evaluate("navigator.clipboard.readText()")

    def state(self):
        return self.page.request.get(f"{self.url}/engine").json()

    def answered(self, text, **last):
        """From now on, every answer of the server is `text`; `last` are further fields of the last chunk."""
        chunks = [{"choices": [{"delta": {"content": text}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]} | last]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))

    def grid(self):
        return self.page.evaluate("document.querySelector('#grid').toDataURL()")


def records(page):
    """What the page keeps in IndexedDB, by table."""
    return page.evaluate("""async () => {
        const result = (request) => new Promise((resolve, reject) => {
            request.onsuccess = () => resolve(request.result);
            request.onerror = () => reject(request.error);
        });
        const database = await result(indexedDB.open("larder"));
        const tables = {};
        for (const name of database.objectStoreNames) tables[name] = await result(database.transaction(name).objectStore(name).getAll());
        database.close();
        return tables;
    }""")
