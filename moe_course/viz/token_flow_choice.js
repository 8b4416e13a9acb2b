// What can be chosen, and what a choice of rank and expert shows of a pass, in numbers and in words.

// The state that follows a wish, and its pass. What there is not (rank 77, a step as text) is left as it was.
function stateAfter(data, state, wanted) {
  const next = { ...state };
  const take = (name, fits) => { if (name in wanted && fits(wanted[name])) next[name] = wanted[name] ?? null; };
  const below = (most) => (value) => value === null || value === undefined || (Number.isInteger(value) && value >= 0 && value < most);
  for (const name of ["step", "layer"]) take(name, (value) => data.passes.some((pass) => pass[name] === value));
  const ofStep = data.passes.filter((pass) => pass.step === next.step);
  const pass = ofStep.find((one) => one.layer === next.layer) ?? ofStep[0] ?? data.passes[0];
  [next.step, next.layer] = [pass.step, pass.layer];
  take("token", below(pass.tokens.length));
  if (next.token >= pass.tokens.length) next.token = null;
  take("rank", below(data.ranks));
  take("expert", below(data.experts));
  return { state: next, pass };
}

// Which routes a choice shows: those from or to a rank, those to an expert.
const ofRank = (model, rank) => (i) => rank === null || model.source[i] === rank || model.owner[i] === rank;
const shownBy = (model, { rank, expert }) => (i) => ofRank(model, rank)(i) && (expert === null || model.expert[i] === expert);

// The experts that can be chosen with a rank, as [expert, text]: those with a route from or to it.
function expertsWith(data, model, rank) {
  const load = new Int32Array(data.experts);
  for (let i = 0; i < model.n; i++) if (ofRank(model, rank)(i)) load[model.expert[i]] += 1;
  const used = [...load.keys()].filter((e) => load[e] > 0);
  const part = (e) => (load[e] < model.expertLoad[e] ? `${whole(load[e])} of ` : "");
  return used.map((e) => [e, `${e} · rank ${data.owner[e]} · ${part(e)}${counted(model.expertLoad[e], "route")}`]);
}

// "from or to rank 2 and to expert 7"; nothing where all is shown.
function choiceText({ rank, expert }) {
  return [rank === null ? [] : `from or to rank ${rank}`, expert === null ? [] : `to expert ${expert}`].flat().join(" and ");
}

// What is shown and what is left out of a pass, in a sentence.
function shownText(model, state) {
  const choice = choiceText(state);
  if (!choice) return "";
  const shown = model.expert.reduce((sum, _, i) => sum + Number(shownBy(model, state)(i)), 0);
  if (shown === model.n) return `Shown: routes ${choice}, which are all ${whole(shown)}.`;
  const rest = model.n - shown;
  return `Shown: only routes ${choice}, ${whole(shown)} of ${whole(model.n)}, and the rows that carry them; the other ${counted(rest, "route")} ${rest === 1 ? "is" : "are"} left out.`;
}

// Rows that carry shown routes, and their bytes, in the form of `wireTotals`. Empty places carry none.
function shownTotals(data, copies, width) {
  const into = new Int32Array(data.ranks);
  for (const copy of copies) into[copy[2]] += 1;
  return { rows: copies.length, empty: 0, bytes: copies.length * width, emptyBytes: 0, into };
}
