
"use strict";

// Tables: the header of each column becomes a button that sorts the rows.
for (const table of document.querySelectorAll("table.sortable")) {
  for (const header of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    header.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => sort(table, header));
  }
}

function sort(table, header) {
  const descending = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentNode.cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, cell: row.cells[header.cellIndex] }));
  const value = ({ cell }) => ("v" in cell.dataset ? Number(cell.dataset.v) : undefined);
  const text = ({ cell }) => cell.textContent.trim();
  const order = descending ? -1 : 1;
  rows.sort((a, b) => {
    if (!header.classList.contains("n")) return order * text(a).localeCompare(text(b), "en", { numeric: true });
    const [x, y] = [value(a), value(b)];
    // A number that is missing comes last in either order.
    return x === undefined || y === undefined ? (x === undefined) - (y === undefined) : order * (x - y);
  });
  body.append(...rows.map(({ row }) => row));
}

// Charts: the point nearest to the pointer, or the focused one, is read out below. Each chart is one stop of the tab
// key; arrow keys go from point to point.
for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg");
  const points = [...svg.querySelectorAll(".mark")];
  const show = (point) => {
    for (const other of points) other.classList.toggle("on", other === point);
    read(figure, point?.querySelector("title").textContent);
  };
  const nearest = (event) => {
    const shown = points.filter((point) => !point.classList.contains("dim"));
    const distance = (point) => {
      const box = point.getBoundingClientRect();
      const beyond = (at, from, to) => Math.max(from - at, at - to, 0);
      const inside = Math.hypot(beyond(event.clientX, box.left, box.right), beyond(event.clientY, box.top, box.bottom));
      return inside + Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY) / 100;
    };
    const found = shown.map((point) => [distance(point), point]).sort((a, b) => a[0] - b[0])[0];
    return found && found[0] < 40 ? found[1] : undefined;
  };
  svg.addEventListener("pointermove", (event) => show(nearest(event)));
  svg.addEventListener("pointerdown", (event) => show(nearest(event)));
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(points.find((p) => p === document.activeElement)));
  svg.addEventListener("focusin", (event) => show(event.target));
  svg.addEventListener("focusout", () => show());
  svg.addEventListener("keydown", (event) => {
    const at = points.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: points.length - 1,
      ArrowDown: series(points, at, 1), ArrowUp: series(points, at, -1) }[event.key];
    if (at < 0 || !points[to]) return;
    event.preventDefault();
    points[at].tabIndex = -1;
    points[to].tabIndex = 0;
    points[to].focus();
  });
}

// The point of the next or previous curve that is nearest in x.
function series(points, at, step) {
  if (!points[at]) return -1;
  const x = (point) => point.getBoundingClientRect().x;
  const names = [...new Set(points.map((point) => point.dataset.s))];
  const name = names[names.indexOf(points[at].dataset.s) + step];
  const there = points.filter((point) => point.dataset.s === name);
  there.sort((a, b) => Math.abs(x(a) - x(points[at])) - Math.abs(x(b) - x(points[at])));
  return points.indexOf(there[0]);
}

function read(figure, text) {
  const readout = figure.querySelector(".readout");
  readout.dataset.hint ??= readout.textContent;
  readout.textContent = text ?? readout.dataset.hint;
  readout.classList.toggle("says", text !== undefined);
}

// Legends: a press brings one curve to the front in all charts of the group.
for (const legend of document.querySelectorAll(".legend")) {
  const buttons = [...legend.querySelectorAll("button")];
  const parts = [...legend.nextElementSibling.querySelectorAll("[data-s]")];
  legend.addEventListener("click", (event) => {
    const pressed = event.target.closest("button");
    if (!pressed) return;
    const only = pressed.getAttribute("aria-pressed") === "true" ? undefined : pressed.dataset.s;
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.s === only);
    for (const part of parts) part.classList.toggle("dim", only !== undefined && part.dataset.s !== only);
  });
}

// Heat maps: the cell below the pointer or the cursor of the arrow keys is read out.
for (const figure of document.querySelectorAll("figure.heat")) {
  const svg = figure.querySelector("svg[data-cells]");
  const cells = svg.dataset.cells.split("|");
  const [left, top, wide, high, first] = ["left", "top", "wide", "high", "first"].map((key) => Number(svg.dataset[key]));
  const words = { ".": "not resident", s: "resident, not requested", h: "hit", m: "miss" };
  const cursor = svg.querySelector(".cursor");
  let [pass, expert] = [0, 0];
  const show = (x, y) => {
    if (!cells[y]?.[x]) return false;
    [pass, expert] = [x, y];
    const cell = cells[y][x];
    const evicted = cell !== cell.toLowerCase() || cell === "x";
    read(figure, `pass ${first + x}, expert ${y}: ${words[cell === "x" ? "." : cell.toLowerCase()]}${evicted ? ", evicted" : ""}`);
    for (const [name, value] of Object.entries({ x: left + wide * x, y: top + high * y, width: wide, height: high })) cursor.setAttribute(name, value);
    return true;
  };
  const point = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    show(Math.floor((at.x - left) / wide), Math.floor((at.y - top) / high));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("focus", () => show(pass, expert));
  svg.addEventListener("keydown", (event) => {
    const [x, y] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key] ?? [0, 0];
    if ((x || y) && show(pass + x, expert + y)) {
      event.preventDefault();
      cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
  });
}

// On paper everything is unfolded.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) {
    details.open = true;
    addEventListener("afterprint", () => (details.open = false), { once: true });
  }
});
