// Part of token_text.js: where tokens went, as numbers and words. No page is needed here.

// Where the tokens of one layer went: prompt -> tokens by position, each with {pass, indices, ranks, shares: [weight per
// rank], routes}. A token whose row several ranks share is one token, and its routes are those of all of them.
function tokenShares(data, layer) {
  const prompts = data.prompts.map(() => []);
  data.passes.forEach((pass, number) => {
    if (pass.layer !== layer) return;
    const found = new Map(); // prompt and position -> token
    const byIndex = pass.tokens.map((token, index) => {
      const name = `${token.prompt} ${token.position}`;
      if (!found.has(name)) found.set(name, { ...token, pass: number, indices: [], ranks: [], shares: new Array(data.ranks).fill(0), routes: [] });
      const one = found.get(name);
      one.indices.push(index);
      one.ranks.push(token.rank);
      return one;
    });
    pass.routes.token.forEach((index, route) => {
      byIndex[index].shares[pass.routes.owner[route]] += pass.routes.weight[route];
      byIndex[index].routes.push(route);
    });
    for (const token of found.values()) prompts[token.prompt]?.push(token);
  });
  for (const tokens of prompts) tokens.sort((a, b) => a.position - b.position);
  return prompts;
}

// The rank that has the largest share; the lowest one of equals.
const mainRank = (shares) => shares.indexOf(Math.max(...shares));

// A token in words, its text as a whole or shortened.
function describeToken(data, token, text = token.text) {
  const routes = data.passes[token.pass].routes;
  const byOwner = new Map();
  for (const route of token.routes) {
    const owner = routes.owner[route];
    if (!byOwner.has(owner)) byOwner.set(owner, []);
    byOwner.get(owner).push(`${routes.expert[route]} (${routes.weight[route].toFixed(2)})`);
  }
  const parts = [...byOwner.keys()].sort((a, b) => a - b).map((owner) => `rank ${owner}: ${byOwner.get(owner).join(", ")}`);
  const home = token.ranks.length > 1 ? `on ranks ${token.ranks.join(", ")}` : `from rank ${token.ranks[0]}`;
  return `${isolated(text)} at position ${token.position}, ${home}. Experts (weight) on ${parts.join("; ") || "no rank"}`;
}
