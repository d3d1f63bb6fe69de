"""How the page reads: its colours by choice, the colours of code, and formulas."""

import time

from .views import clean

DARK = "rgb(22, 22, 20)"
LIGHT = "rgb(250, 249, 246)"
PAPER = "getComputedStyle(document.body).backgroundColor"


def theme(test):
    """Colours of the system's choice or one's own, in all tabs, from the first paint on."""
    page = test.page
    # What the body looks like as soon as it exists, and whenever it is painted from then on.
    page.add_init_script("""window.painted = [];
        const look = () => {
            if (document.body) window.painted.push(getComputedStyle(document.body).backgroundColor);
            if (window.painted.length < 20) requestAnimationFrame(look);
        };
        look();
        new MutationObserver((_, observer) => document.body && (window.painted.push(getComputedStyle(document.body).backgroundColor), observer.disconnect()))
            .observe(document, { childList: true, subtree: true });""")
    page.emulate_media(color_scheme="dark")
    test.open()
    until_dark(test, True)
    assert chosen(page) == "system"
    grid = test.grid()
    page.emulate_media(color_scheme="light")
    until_dark(test, False)
    test.until(f"document.querySelector('#grid').toDataURL() !== {grid!r}")
    page.get_by_role("radio", name="Dark").check()
    until_dark(test, True)
    test.until(f"document.querySelector('#grid').toDataURL() === {grid!r}")
    for path in ("/", "/#other"):
        page.goto("about:blank")
        test.open(path)
        until_dark(test, True)
        assert chosen(page) == "dark"
        test.until("window.painted.length >= 20")
        assert set(page.evaluate("window.painted")) == {DARK}, page.evaluate("window.painted")
    with test.another_tab() as other:
        other.page.emulate_media(color_scheme="light")
        other.open()
        until_dark(other, True)
        other.page.get_by_role("radio", name="Dark").focus()
        other.page.keyboard.press("ArrowLeft")
        until_dark(other, False)
        assert chosen(other.page) == "light"
        until_dark(test, False)
        test.until("document.querySelector('#theme :checked').value === 'light'")
        page.get_by_role("radio", name="System").check()
        assert page.evaluate("localStorage.length") == 0
        other.until("document.querySelector('#theme :checked').value === 'system'")


def theme_against_the_system(test):
    """Both themes where the system has the other one; axe finds nothing."""
    page = test.open()
    for chosen_theme, system in (("Dark", "light"), ("Light", "dark")):
        page.emulate_media(color_scheme=system)
        page.get_by_role("radio", name=chosen_theme).check()
        test.answered("Some *text*, `code` and a [link](https://example.org).")
        test.send("The lighthouse")
        test.wait_until_written()
        clean(page, f"{chosen_theme}, system {system}")
        page.click("#settings-button")
        clean(page, f"{chosen_theme}, settings")
        page.click("#settings-button")


def theme_without_storage(test):
    """A browser that lets the page keep nothing: the choice holds until the page is closed."""
    page = test.page
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } });")
    test.open()
    assert chosen(page) == "system"
    page.get_by_role("radio", name="Dark").check()
    until_dark(test, True)
    test.open()
    until_dark(test, False)


def chosen(page):
    return page.evaluate("document.querySelector('#theme :checked').value")


def until_dark(test, wanted):
    scheme, paper = ("dark", DARK) if wanted else ("light", LIGHT)
    test.until(f"{PAPER} === {paper!r} && getComputedStyle(document.documentElement).colorScheme === {scheme!r}")


CODE = {
    "rust": ("fn main() { let s = \"a\"; } // end\n/* a\n/* b */ c */ 0x1f", {"keyword": ["fn", "let"], "string": ['"a"'], "comment": ["// end", "/* a", "/* b */ c */"], "number": ["0x1f"], "name": ["main"]}),
    "python": ("@cache\ndef f(x):\n    '''doc\n    more''' # no\n    return 3.5", {"keyword": ["def", "return"], "string": ["'''doc", "    more'''"], "comment": ["# no"], "number": ["3.5"], "name": ["@cache", "f"]}),
    "js": ("const a = `x\ny`; // c\nif (null) g(1)", {"keyword": ["const", "if"], "string": ["`x", "y`"], "comment": ["// c"], "number": ["null", "1"], "name": ["g"]}),
    "tsx": ("interface A { a: string }", {"keyword": ["interface", "string"]}),
    "c++": ("#include <a>\nint x = 'c'; /* d */", {"keyword": ["#include", "int"], "string": ["'c'"], "comment": ["/* d */"]}),
    "go": ("func f() { return nil }", {"keyword": ["func", "return"], "number": ["nil"], "name": ["f"]}),
    "java": ("@Override public int f() { }", {"keyword": ["public", "int"], "name": ["@Override", "f"]}),
    "bash": ("for f in *; do echo \"$f\" a#b --all $x; done # c", {"keyword": ["for", "in", "do", "echo", "done"], "string": ['"$f"'], "comment": ["# c"], "name": ["--all", "$x"]}),
    "json": ('{"a": [1, true, "b"]}', {"name": ['"a"'], "number": ["1", "true"], "string": ['"b"']}),
    "yaml": ("# c\nkey: it's fine\n- url: \"x\"", {"comment": ["# c"], "name": ["key", "url"], "string": ['"x"']}),
    "toml": ("[a.b]\nk = 'v' # c", {"keyword": ["[a.b]"], "name": ["k"], "string": ["'v'"], "comment": ["# c"]}),
    "html": ("<p class=\"x\">it's</p><!-- c --><script>let a;</script>", {"keyword": ["<p", ">", "</p", ">", "<script", ">", "let", "</script", ">"], "name": ["class"], "string": ['"x"'], "comment": ["<!-- c -->"]}),
    "css": ("a { color: #fff; /* c */ }", {"name": ["color"], "number": ["#fff"], "comment": ["/* c */"]}),
    "sql": ("SELECT a FROM t WHERE b = 'c' -- d", {"keyword": ["SELECT", "FROM", "WHERE"], "string": ["'c'"], "comment": ["-- d"]}),
    "diff": ("@@ -1 +1 @@\n-old\n+new\n same", {"name": ["@@ -1 +1 @@"], "removed": ["-old"], "added": ["+new"]}),
    "kotlin": ("val a = \"b\" // c\n7", {"string": ['"b"'], "comment": ["// c"], "number": ["7"]}),
    "": ("for \"a\" 1", {}),
}
HOSTILE_CODE = "<img src=x onerror=window.harmed=1>\n<script>window.harmed=1</script>\n" + "'" * 500 + "/*" * 3000 + "\n" + "${" * 4000 + "\n" + "r####" * 2000 + "\n" + "- " * 4000 + "\n" + "<a " * 3000


def code(test):
    """The colours of all languages, in both themes; text of strangers stays text, and takes no long time."""
    page = test.open()
    test.answered("\n\n".join(f"```{language}\n{text}\n```" for language, (text, _) in CODE.items()))
    test.send("Code")
    test.wait_until_written()
    blocks = page.locator(".answer .code")
    for i, (language, (text, wanted)) in enumerate(CODE.items()):
        block = blocks.nth(i)
        assert block.locator("code").evaluate("(code) => code.textContent") == text, language
        found = {}
        for kind, part in block.locator("code span").evaluate_all("(all) => all.map((one) => [one.className, one.textContent])"):
            found.setdefault(kind, []).append(part)
        assert found == wanted, (language, found)
        assert block.locator("div > span").inner_text() == (language or "text")
        block.get_by_role("button", name="Copy this code").click()
        assert test.copied() == text, language
    for name in ("Light", "Dark"):
        page.get_by_role("radio", name=name).check()
        clean(page, f"code, {name}")
    for language in CODE:
        page.click("#new-chat")
        test.answered(f"```{language}\n{HOSTILE_CODE}")
        start = time.monotonic()
        test.send("Code")
        test.wait_until_written()
        assert time.monotonic() - start < 4, language
        assert page.locator(".answer code").evaluate("(code) => code.textContent") == HOSTILE_CODE, language
        assert page.locator(".answer code :not(span)").count() == 0
    assert page.evaluate("window.harmed") is None


# The stream of an answer in the hands of the check: `window.grow(text)` adds to it, `window.end()` ends it.
STREAM = """const real = window.fetch;
    window.fetch = (path, options) => {
        if (!String(path).endsWith('/v1/chat/completions')) return real(path, options);
        const body = new ReadableStream({ start(stream) {
            const send = (chunk) => stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
            window.grow = (content) => send({ choices: [{ delta: { content } }] });
            window.end = () => (send({ choices: [{ delta: {}, finish_reason: 'stop' }] }), stream.close());
        } });
        return Promise.resolve(new Response(body, { headers: { 'content-type': 'text/event-stream' } }));
    };"""


def code_that_grows(test):
    """A block is coloured while it is written: only its last line anew, in a block of its own and in a list."""
    page = test.page
    page.add_init_script(STREAM)
    test.open()
    for indent, opening in (("", "Here:\n\n```rust\n"), ("  ", "- Here:\n\n  ```rust\n")):
        page.click("#new-chat")
        test.send("Code")
        test.until("Boolean(window.grow)")
        grow(test, opening + indent + "let first = 1;\n" + indent + "/* open")
        test.until("document.querySelector('.answer .comment')?.textContent === '/* open'")
        page.evaluate("""() => {
            window.first = document.querySelector('.answer .keyword');
            window.added = 0;
            new MutationObserver((all) => all.forEach(({ addedNodes }) => (window.added += addedNodes.length)))
                .observe(document.querySelector('.answer code'), { childList: true });
        }""")
        grow(test, " comment */\n")
        for i in range(120):
            grow(test, f"{indent}let line_{i} = {i};\n")
        assert page.locator(".answer code .keyword").count() == 121
        assert page.evaluate("window.first === document.querySelector('.answer .keyword') && window.first.isConnected")
        # Per line a keyword, a number and the text between, some of them twice.
        assert 120 * 4 <= page.evaluate("window.added") < 120 * 12, page.evaluate("window.added")
        grow(test, indent + "```\n\n" + indent + "Done `x`.")
        page.evaluate("window.end(), window.grow = null")
        test.wait_until_written()
        text = page.locator(".answer code").first.evaluate("(code) => code.textContent")
        assert text.startswith("let first = 1;\n/* open comment */\nlet line_0 = 0;\n") and text.endswith("let line_119 = 119;"), text
        assert page.evaluate("window.first.isConnected") and "Done x." in test.text()


def grow(test, text):
    """Adds to the answer, and waits until it is shown."""
    test.page.evaluate("(text) => new Promise((shown) => { window.grow(text); setTimeout(() => requestAnimationFrame(() => setTimeout(shown)), 5); })", text)


FORMULAS = r"""The roots of $ax^2+bx+c=0$ are

$$x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}.$$

It costs $5 and $6, or $7, US$8 and US$9 between $x_1$ and \$3, \(e^{i\pi}\) and again $ax^2+bx+c=0$, $$y$$ in a line; `$z$` is code, **bold $a*b*c$**.

\[
\begin{aligned}
a &= b \\

- c &= \boxed{42} & x < 5
\end{aligned}
\]

```
$code$
```

- an item with $\hat{x}$, and the unknown $\unknown{x}$
"""


def formulas(test):
    """Formulas become MathML; prices and code stay; each formula is requested once; copies have the source."""
    page, requested = test.open(), []
    page.on("request", lambda request: requested.extend(request.post_data_json["formulas"]) if request.url.endswith("/mathml") else None)
    test.answered(FORMULAS)
    test.send("Formulas")
    test.wait_until_written()
    text = page.locator(".answer .text")
    test.until("document.querySelectorAll('.answer math').length === 9")
    assert text.locator("math[display=block]").count() == 3 and text.locator("mfrac").count() == 1
    shown = text.inner_text()
    for kept in ("It costs $5 and $6, or $7, US$8 and US$9 between ", " and $3, ", "$\\unknown{x}$"):
        assert kept in shown, (kept, shown)
    assert text.locator("code").all_inner_texts() == ["$z$", "$code$"] and text.locator("strong math").count() == 1
    assert text.locator("ul li").count() == 1 and "42" in text.locator("mtable mtable").text_content()
    assert text.locator("math").nth(1).get_attribute("alttext") == r"x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}."
    latex = [formula["latex"] for formula in requested]
    assert len(set(latex)) == len(latex) == 9, latex
    test.answer().get_by_role("button", name="Copy this answer").click()
    test.until("document.querySelector('.message:last-child .tools button').textContent === 'Copied'")
    assert test.copied() == FORMULAS
    # What is known is not requested again, also what cannot be converted.
    test.answer().get_by_role("button", name="Regenerate").click()
    test.until("document.querySelectorAll('.answer .versions').length === 1 && document.querySelectorAll('.answer math').length === 9")
    page.wait_for_timeout(200)
    assert len(requested) == 9, requested
    for name in ("Light", "Dark"):
        page.get_by_role("radio", name=name).check()
        clean(page, f"formulas, {name}")
    page.set_viewport_size({"width": 390, "height": 780})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    clean(page, "formulas, narrow")


def formulas_that_grow(test):
    """A formula is shown as text until it is closed, and survives what is written behind it."""
    page = test.page
    page.add_init_script(STREAM)
    test.open()
    test.send("Formulas")
    test.until("Boolean(window.grow)")
    grow(test, "Let $x^")
    assert "Let $x^" in test.text() and page.locator(".answer math").count() == 0
    grow(test, "2$ and\n\n\\[\na\n- b\n")
    test.until("document.querySelectorAll('.answer math').length === 1")
    assert page.locator(".answer li").count() == 0 and "- b" in test.text()
    grow(test, "= c\n\\]\n\n")
    test.until("document.querySelectorAll('.answer math').length === 2")
    for word in "and this is the end of it".split():
        grow(test, word + " ")
    page.evaluate("window.end()")
    test.wait_until_written()
    assert page.locator(".answer math").count() == 2 and test.text().endswith("end of it")


def formulas_of_a_hostile_server(test):
    """Of MathML that a server sends, only known parts are shown; a server that refuses leaves the sources."""
    page = test.open()
    # The policy refuses styles already while MathML is parsed.
    test.allowed = ("500", "inline style")
    hostile = [
        '<math><mi href="javascript:window.harmed=1" onclick="window.harmed=2" style="color:red" class="menv-x evil" stretchy="true" width="9999em">x</mi></math>',
        "<math><mi>x</mi><script>window.harmed=3</script></math>",
        "<math><mtext><img src=x onerror=window.harmed=4></mtext></math>",
        '<math><annotation-xml encoding="text/html"><p>x</p></annotation-xml></math>',
        "<svg onload=window.harmed=5></svg>", "<img src=x onerror=window.harmed=6>", "", None, 7,
        "<math><semantics><mi>x</mi></semantics></math>",
    ]
    body = {"formulas": [{"mathml": mathml} for mathml in hostile]}
    page.route("**/mathml", lambda route: route.fulfill(json=body))
    names = [f"x_{{{i}}}" for i in range(len(hostile))]
    test.answered(" ".join(f"${name}$" for name in names))
    test.send("Formulas")
    test.wait_until_written()
    test.until("document.querySelectorAll('.answer math').length === 1")
    assert page.locator(".answer math").evaluate("(math) => math.outerHTML") == '<math alttext="x_{0}"><mi class="menv-x" stretchy="true">x</mi></math>'
    assert page.locator(".answer :is(script, img, svg, annotation-xml, semantics, p p)").count() == 0
    assert test.text().split()[1:] == [f"${name}$" for name in names[1:]], test.text()
    assert page.evaluate("window.harmed") is None
    asked = []
    page.unroute("**/mathml")
    page.route("**/mathml", lambda route: (asked.append(1), route.fulfill(status=500, json={"error": {"message": "no"}})))
    page.click("#new-chat")
    test.answered("A $y_1$ and $y_2$.\n\n" + "$$" * 3000 + "\n\n" + "$a " * 3000 + "\n\n" + "\\[\n" * 3000)
    start = time.monotonic()
    test.send("Formulas")
    test.wait_until_written()
    assert time.monotonic() - start < 5
    test.until("document.querySelector('.answer .text').innerText.startsWith('A $y_1$ and $y_2$.')")
    page.wait_for_timeout(300)
    assert len(asked) == 1, asked
