// What is said in words and tables: the chosen token, all routes, the counts that tick.

const wayOf = (data, model, i) => {
  const [source, via, owner] = [model.source[i], model.via[i], model.owner[i]];
  if (source === owner) return `stays on ${owner}`;
  return via >= 0 && via !== source && via !== owner ? `${source} → ${via} → ${owner}` : `${source} → ${owner}`;
};

const slot = (n) => (n < 0 ? "–" : whole(n));

function rankCell(rank) {
  const mark = { circle: "●", square: "■", triangle: "▲", diamond: "◆" }[rankMark(rank)];
  return h("td", {}, h("span", { style: `color:${rankColour(rank)}`, "aria-hidden": "true" }, mark), ` ${rank}`);
}

const HEADS = {
  k: "choice: 0 is the router's first", expert: "number of the expert", "on rank": "rank that owns the expert", weight: "what the expert's output is multiplied by",
  "way (ranks)": "ranks that the row passes", "sent as row": "place among the rows that its rank sends", "arrives as row": "place among the rows at the owner",
};

// A table of routes; `withToken` adds which token each belongs to.
function routeTable(data, model, routes, withToken) {
  const widest = Math.max(...routes.map((i) => model.weight[i]), 1e-9);
  const names = [...(withToken ? ["token", "from rank", "row"] : []), ...Object.keys(HEADS)];
  const line = (i) => {
    const token = model.tokens[model.token[i]];
    return h("tr", {},
      withToken ? [h("td", { class: "mc-mono" }, token.text), rankCell(token.rank), h("td", {}, whole(token.row))] : [],
      h("td", {}, String(model.k[i])), h("td", {}, h("b", {}, String(model.expert[i]))), rankCell(model.owner[i]),
      h("td", {}, h("span", { class: "mc-weight", style: `width:${(40 * model.weight[i]) / widest}px;background:${rankColour(model.owner[i])}` }), model.weight[i].toFixed(3)),
      h("td", {}, wayOf(data, model, i)), h("td", {}, slot(model.pass.routes.send_row[i])), h("td", {}, slot(model.pass.routes.receive_row[i])));
  };
  return h("table", {}, h("caption", {}, "k: the router's choices, 0 is its first. Sent as row: place among the rows that its rank sends. Arrives as row: place at the owner."), h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col", title: HEADS[name] }, name)))), h("tbody", {}, routes.map(line)));
}

const named = (token) => `“${isolated(token.text)}”, row ${token.row} of rank ${token.rank}`;

// In one sentence: where a token's contributions come from.
function sharesOf(model, routes) {
  const ranks = new Map();
  for (const i of routes) {
    const seen = ranks.get(model.owner[i]) ?? { n: 0, weight: 0 };
    ranks.set(model.owner[i], { n: seen.n + 1, weight: seen.weight + model.weight[i] });
  }
  return [...ranks].sort((a, b) => a[0] - b[0]).map(([rank, { n, weight }]) => `rank ${rank}: ${counted(n, "expert")}, weight ${weight.toFixed(2)}`).join(" · ");
}

// "310 of 465 rows between ranks, 159 kB" for one direction, of which `rows` have arrived; where a choice leaves rows
// out, those shown are counted, and `all` is said, too.
function legText(name, total, rows, all = total) {
  if (all.rows + all.empty === 0) return `${name}: no row leaves its rank`;
  if (all !== total) {
    const empty = all.empty ? ` + ${whole(all.empty)} empty places, ${bytesText(all.emptyBytes)}` : "";
    const bytes = bytesText(total.rows ? (total.bytes * rows) / total.rows : 0);
    return `${name}: ${whole(rows)} of ${counted(total.rows, "shown row")} between ranks, ${bytes} (in all ${counted(all.rows, "row")}, ${bytesText(all.bytes)}${empty})`;
  }
  const part = total.rows ? rows / total.rows : 1;
  const padding = total.empty ? ` + ${whole(total.empty * part)} empty places, ${bytesText(total.emptyBytes * part)}` : "";
  return `${name}: ${whole(rows)} of ${counted(total.rows, "row")} between ranks, ${bytesText(total.bytes * part)}${padding}`;
}

// The texts in front of a token, as far as the recorded passes have them.
function textBefore(data, { prompt, position }) {
  data.textOf ??= data.passes.reduce((texts, pass) => {
    for (const token of pass.tokens) (texts[token.prompt] ??= [])[token.position] = token.text;
    return texts;
  }, []);
  return data.textOf[prompt].slice(0, position).join("").replaceAll("·start", "");
}

// What a token, a row and a route are.
function wordsOf(data) {
  const tokens = data.passes[0].tokens;
  const letters = tokens.filter((token) => [...token.text].length === 1).length > tokens.length / 2;
  return `A token is ${letters ? "one character" : "a piece of text"} here; its row is the vector that travels; a route is one (row, expert) pair.`;
}

// One phase of a whole pass in a sentence; loads are told from the experts on. `shown`: what a choice shows of it.
function inWords(model, totals, { step, layer }, phase, shown = "") {
  const at = PHASES.indexOf(phase);
  const rows = (total) => (total ? `, ${counted(total.rows, "row")} between ranks` : "");
  const routes = at === 0 ? ", not routed yet" : `, ${counted(model.n, "route")}`;
  const travel = phase === "dispatch" ? rows(totals?.[0]) : phase === "combine" ? rows(totals?.[1]) : "";
  const busiest = at < 3 ? "" : `; busiest ${model.busiest.length > 1 ? "ranks" : "rank"} ${model.busiest.join(" and ")} with ${counted(model.mostLoad, "route")}`;
  return `Step ${step}, layer ${layer}, ${phase}: ${counted(distinctTokens(model.tokens), "token")}${routes}${travel}${busiest}.${shown && ` ${shown}`}`;
}

// What is told of the chosen token: as long as it is not routed, the style sheet hides
// `.mc-routed`, and `.mc-back` until all is done.
function chosenDetails(data, model, token, all, state, withTable) {
  if (!token) return [h("p", { class: "mc-quiet" }, "Choose a token, by a click on it or from the list, to see where its contributions come from.")];
  const [routes, others] = [all.filter(shownBy(model, state)), all.filter((i) => !shownBy(model, state)(i))];
  const shown = sharesOf(model, routes) || (others.length ? `none of its routes is ${choiceText(state)}` : "no rank");
  const where = others.length ? `${shown} · left out here: ${sharesOf(model, others)}` : shown;
  const sum = others.length ? `the sum of all ${whole(all.length)} contributions` : "their sum";
  const head = h("p", {}, h("b", {}, `Token ${named(token)}`), h("span", { class: "mc-not-yet" }, ": not routed yet"), h("span", { class: "mc-routed" }, ` → ${where}`), h("span", { class: "mc-back" }, ` → back on rank ${token.rank}: ${sum}`));
  if (!withTable || !routes.length) return [head];
  return [head, h("div", { class: "mc-scroll mc-routed", tabindex: 0, role: "region", "aria-label": "Contributions of the chosen token" }, routeTable(data, model, routes, false))];
}

// All routes as a table, as many as can be read.
function longTable(data, model, routes) {
  const cut = routes.length > 600 ? [h("p", { class: "mc-quiet" }, `The first 600 of ${whole(routes.length)} routes. Choose a token, a rank or an expert to see others.`)] : [];
  return [...cut, routeTable(data, model, routes.slice(0, 600), true)];
}
