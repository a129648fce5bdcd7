/* How long the requests of the last ten minutes waited: a histogram that is a table. */

import { $, h, keyed, show, text } from "./dom.js";
import { KEPT, waited } from "./state.js";
import { many, seconds } from "./words.js";

const EDGES = [0.1, 1, 2.5, 5, 10, 30, 60, 120, 300, Infinity];
const KINDS = ["served", "gaveUp", "still"];
const NAMES = { served: "served", gaveUp: "gave up or refused", still: "still waiting" };

export class Waits {
  constructor(state) {
    this.state = state;
  }

  draw(lease) {
    const now = this.state.now();
    // Always-resident models take no turn: their requests would only hide those who do.
    const tickets = this.state
      .recent(lease)
      .filter((ticket) => ticket.mode !== "none" && (ticket.granted ?? now) >= now - KEPT);
    const buckets = fill(tickets, now);
    const most = Math.max(1, ...buckets.map((bucket) => bucket.total));
    $("histogram").hidden = $("waits-legend").hidden = tickets.length === 0;
    show($("waits-words"), ...words(tickets, now));
    keyed(
      $("buckets"),
      buckets,
      (bucket) => String(bucket.edge),
      (bucket) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, bucket.label),
          h("td", { class: "track" }, ...KINDS.map((kind) => h("i", { class: `bar-${kind}` }))),
          h("td", { class: "num" }, h("span"), h("span", { class: "unseen" })),
        ),
      (row, bucket) => {
        KINDS.forEach((kind, index) => {
          const bar = row.cells[1].children[index];
          bar.hidden = bucket[kind] === 0;
          bar.style.width = `${(100 * bucket[kind]) / most}%`;
        });
        const said = KINDS.filter((kind) => bucket[kind] > 0)
          .map((kind) => `${bucket[kind]} ${NAMES[kind]}`)
          .join(", ");
        text(row.cells[2].firstChild, bucket.total > 0 ? String(bucket.total) : "–");
        text(row.cells[2].lastChild, said && ` (${said})`);
        row.title = said || "none";
      },
    );
  }
}

export function fill(tickets, now) {
  const buckets = EDGES.map((edge, index) => ({
    edge,
    label: edge === Infinity ? `over ${plain(EDGES.at(-2))}` : `${index === 0 ? "under " : "to "}${plain(edge)}`,
    served: 0,
    gaveUp: 0,
    still: 0,
    total: 0,
  }));
  for (const ticket of tickets) {
    const wait = waited(ticket, now);
    const bucket = buckets.find(({ edge }, index) => (index === 0 ? wait < edge : wait <= edge));
    bucket[ticket.granted !== null ? "served" : ticket.ended !== null ? "gaveUp" : "still"] += 1;
    bucket.total += 1;
  }
  return buckets;
}

/** The usual numbers; those who still wait count with their wait so far. */
function words(tickets, now) {
  if (tickets.length === 0) return [h("span", { class: "soft" }, "Nobody came in the last ten minutes.")];
  const waits = tickets.map((ticket) => waited(ticket, now)).sort((a, b) => a - b);
  const at = (share) => waits[Math.min(waits.length - 1, Math.ceil(share * waits.length) - 1)];
  const fact = (name, value) => h("span", { class: "fact" }, h("b", {}, value), ` ${name}`);
  return [
    fact("half waited less", seconds(at(0.5))),
    fact("19 of 20 waited less", seconds(at(0.95))),
    fact("longest", seconds(waits.at(-1))),
    h("span", { class: "unseen" }, `, of ${many(tickets.length, "request")}`),
  ];
}

function plain(edge) {
  return edge >= 60 ? `${edge / 60} min` : `${edge} s`;
}
