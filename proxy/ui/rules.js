/* The rules of this lease in words: its order, what can be resident together, its limits. */

import { $, h, show } from "./dom.js";
import { list, limit, many } from "./words.js";

const ORDERS = {
  phases:
    "Whoever has waited longest opens the next room: the set of models that can be on the GPU together. Everyone who waits " +
    "for that room by then is served in the same phase, so one swap serves many.",
  fifo: "Strictly in order of arrival. Requests that can share the GPU enter together.",
};

export function drawRules(lease) {
  if (lease === undefined) return;
  const { order, rules, resident, limits, closed } = lease;
  const parts = [part(`Order: ${order}`, h("p", {}, ORDERS[order] ?? ""))];
  parts.push(
    part(
      "Together",
      rules.length > 0
        ? h("ul", {}, ...rules.map((rule) => h("li", {}, rule)))
        : h(
            "p",
            {},
            "No model is known to exclude another. Shared requests go side by side, those that need the GPU alone one by one.",
          ),
    ),
  );
  if (resident.length > 0) parts.push(part("On the GPU", h("p", {}, `${list(resident)}, by the grants so far.`)));
  if (limits.max_wait !== undefined) {
    parts.push(
      part(
        "Limits",
        h(
          "p",
          {},
          `A request may wait for ${limit(limits.max_wait)} and hold the GPU for ` +
            `${limit(limits.max_hold)}. ${many(limits.max_waiting, "request")} may wait; the next is turned away at once.`,
        ),
      ),
    );
  }
  if (closed) parts.push(part("Closing", h("p", {}, "The server is stopping. It grants nobody the GPU any more.")));
  show($("rules-words"), ...parts);
}

function part(title, body) {
  return h("div", {}, h("h3", {}, title), body);
}
