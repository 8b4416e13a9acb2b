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

// A table of routes; `withToken` adds which token each belongs to.
function routeTable(data, model, routes, withToken) {
  const widest = Math.max(...routes.map((i) => model.weight[i]), 1e-9);
  const names = [...(withToken ? ["token", "from rank", "row"] : []), "k", "expert", "on rank", "weight", "way (ranks)", "sent as row", "arrives as row"];
  const line = (i) => {
    const token = model.tokens[model.token[i]];
    return h("tr", {},
      withToken ? [h("td", { class: "mc-mono" }, token.text), rankCell(token.rank), h("td", {}, whole(token.row))] : [],
      h("td", {}, String(model.k[i])), h("td", {}, h("b", {}, String(model.expert[i]))), rankCell(model.owner[i]),
      h("td", {}, h("span", { class: "mc-weight", style: `width:${(40 * model.weight[i]) / widest}px;background:${rankColour(model.owner[i])}` }), model.weight[i].toFixed(3)),
      h("td", {}, wayOf(data, model, i)), h("td", {}, slot(model.pass.routes.send_row[i])), h("td", {}, slot(model.pass.routes.receive_row[i])));
  };
  return h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, routes.map(line)));
}

const named = (token) => `“${token.text}”, row ${token.row} of rank ${token.rank}`;

// In one sentence: where a token's contributions come from.
function sharesOf(model, routes) {
  const ranks = new Map();
  for (const i of routes) {
    const seen = ranks.get(model.owner[i]) ?? { n: 0, weight: 0 };
    ranks.set(model.owner[i], { n: seen.n + 1, weight: seen.weight + model.weight[i] });
  }
  return [...ranks].sort((a, b) => a[0] - b[0]).map(([rank, { n, weight }]) => `rank ${rank}: ${counted(n, "expert")}, weight ${weight.toFixed(2)}`).join(" · ");
}

// "310 of 465 rows between ranks, 238 kB" for one direction, of which `rows` have arrived.
function legText(name, total, rows) {
  if (total.rows + total.empty === 0) return `${name}: no row leaves its rank`;
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
