// Speed, hit rate, reads and agreement over the last minutes, as lines.
const CHART_MINUTES = 3;
const CHART_MS = 60_000 * CHART_MINUTES;
/** Until there is more to show, the lines fill this time. */
const SHORTEST_MS = 20_000;
const POINT_MS = 500;
/** Points of longer distance are not joined: nothing was generated between them. */
const GAP_MS = 4 * POINT_MS;
const CHARTS = [
  { id: "speed", name: "Speed", unit: "tokens/s", value: ({ kind, tokens_per_second: rate }) => (kind === "token" && rate ? rate : null) },
  { id: "hits", name: "Hit rate", unit: "%", most: 100, value: ({ hit_rate: rate }) => rate === null ? null : 100 * rate },
  { id: "reads", name: "SSD reads", unit: "MB/s", value: ({ bytes_per_second: rate }) => rate / 1e6 },
  { id: "agreement", name: "Agreement with the model's choice", unit: "%", most: 100, isClose: true, value: ({ agreement }) => 100 * (agreement ?? 1) },
];
/** The points of all charts, the oldest first. */
const points = [];

/** Adds what an event says to the charts, unless the last point is as new. */
function addPoint(event) {
  const at = performance.now();
  if (at - (points.at(-1)?.at ?? -Infinity) < POINT_MS) return;
  points.push({ at, lambda: event.lambda, values: CHARTS.map((chart) => chart.value(event)) });
  drawCharts();
}

/** Draws all charts up to now, and forgets what is older than they show. */
function drawCharts() {
  const now = performance.now();
  while (points.length && now - points[0].at > CHART_MS) points.shift();
  const span = Math.max(SHORTEST_MS, now - (points[0]?.at ?? now));
  const place = (at) => (100 * (1 - (now - at) / span)).toFixed(2);
  const isChange = (i) => i > 0 && points[i].lambda !== points[i - 1].lambda;
  const changes = points.flatMap(({ at }, i) => (isChange(i) ? [`M${place(at)} 0V40`] : [])).join("");
  CHARTS.forEach((chart, i) => drawChart(chart, points.filter(({ values }) => values[i] !== null).map(({ at, values }) => ({ at, value: values[i] })), place, changes));
}

function drawChart({ id, name, unit, most, isClose }, series, place, changes) {
  const values = series.map(({ value }) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const top = most ?? Math.max(high, 1e-9);
  const floor = isClose ? Math.max(0, Math.min(80, 10 * Math.floor(low / 10))) : 0;
  const height = (value) => (39 - (37 * (value - floor)) / (top - floor)).toFixed(2);
  const isJoined = (i) => i > 0 && series[i].at - series[i - 1].at < GAP_MS;
  const line = series.map(({ at, value }, i) => `${isJoined(i) ? "L" : "M"}${place(at)} ${height(value)}`).join("");
  const svg = $(`${id}-line`);
  svg.querySelector(".line").setAttribute("d", line);
  svg.querySelector(".mark").setAttribute("d", changes);
  const shown = (value) => (most ? value.toFixed(1) : value ? formatNumber(value) : "0");
  $(`${id}-now`).textContent = values.length ? `${shown(values.at(-1))} ${unit}` : "–";
  $(`${id}-range`).textContent = values.length ? `${floor} to ${+top.toFixed(1)}` : "";
  const text = values.length ? `last ${shown(values.at(-1))} ${unit}, lowest ${shown(low)}, highest ${shown(high)}` : "no answer";
  svg.setAttribute("aria-label", `${name} over the last ${CHART_MINUTES} minutes: ${text}`);
}

// While nothing is generated, the lines move out of sight.
setInterval(() => points.length && drawCharts(), 2000);
