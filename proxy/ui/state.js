/*
 * What is known about requests: built from the feed's events and from GET /lease, read by everything that draws.
 * Times are Unix seconds by the server's clock. Nothing here touches the document.
 *
 * Events are facts and may come in any order against the answers of GET /lease. Such an answer has the number of the
 * last event that it includes: it brings in tickets that were never heard of, as a guess until their first event, and
 * ends those that it no longer has, unless something newer was heard about them.
 */

export const KEPT = 600;
const MOST = 5000;
const ENDS = new Set(["released", "rejected", "timeout", "cancelled"]);

export class State {
  constructor(clock = () => Date.now() / 1000) {
    this.clock = clock;
    this.offset = 0;
    this.frozen = null;
    this.leases = {};
    this.models = [];
    this.since = null;
    this.version = "";
    this.stopping = false;
    this.known = false;
    this.clear();
  }

  /** Forget every ticket; the feed starts over. */
  clear() {
    this.tickets = new Map();
    this.live = new Set(); // those of `tickets` that have not ended
  }

  /** The server's time. Stands still while the server cannot be heard: nobody knows whether they still wait. */
  now() {
    return this.frozen ?? this.clock() + this.offset;
  }

  freeze() {
    this.frozen ??= this.now();
  }

  thaw() {
    this.frozen = null;
  }

  /** One event of the feed; `number` is the number in its id. */
  apply(told, number) {
    const ticket = this.#ticket(told.lease, told.ticket, told.ticket || `0-${number}`, told);
    ticket.heard = Math.max(ticket.heard, number);
    if (ticket.guessed) Object.assign(ticket, { guessed: false, granted: null, opened: null });
    ticket.arrived = told.arrived;
    if (told.granted !== undefined && ticket.granted === null)
      this.#grant(ticket, told.granted, told.swap, told.overtook);
    if (told.opened !== undefined) ticket.opened = told.opened;
    if (ENDS.has(told.kind)) {
      ticket.outcome = told.kind === "released" ? told.reason || "done" : told.kind;
      ticket.reason = told.reason;
      this.#end(ticket, told.at);
    }
    if (told.at > this.now() && this.frozen === null) this.offset += told.at - this.now();
  }

  /** A body of GET /lease. */
  merge(body) {
    this.offset = body.now - this.clock();
    this.leases = body.leases;
    this.models = body.models;
    this.since = body.events.since;
    this.version = body.version;
    this.stopping = body.stopping;
    this.known = true;
    const number = numberOf(body.events.last);
    const present = new Set();
    for (const [lease, { holders, waiting }] of Object.entries(body.leases)) {
      for (const one of [...holders, ...waiting]) {
        const granted = one.held === undefined ? null : body.now - one.held;
        const arrived = (granted ?? body.now) - one.waited;
        const opened = one.opened ? granted : null;
        const ticket = this.#ticket(lease, one.number, one.number, { ...one, request: one.id, arrived });
        present.add(ticket);
        if (ticket.heard === 0) Object.assign(ticket, { guessed: true, granted, opened });
      }
    }
    for (const ticket of this.live) {
      if (ticket.heard > number || present.has(ticket)) continue;
      ticket.outcome = "unknown"; // until its own event comes
      this.#end(ticket, body.now);
    }
  }

  /** Forget what is older than ten minutes, and the oldest of too many. */
  prune() {
    const oldest = this.now() - KEPT;
    const ended = [...this.tickets.values()].filter((ticket) => ticket.ended !== null);
    const excess = ended.length - MOST;
    ended
      .sort((a, b) => a.ended - b.ended)
      .forEach((ticket, index) => {
        if (ticket.ended < oldest || index < excess) this.tickets.delete(ticket.key);
      });
  }

  /** Of one lease, those who wait, oldest first: their position is their place here, from 1. */
  waiting(lease) {
    return this.#live(lease).filter((ticket) => ticket.granted === null);
  }

  /** Of one lease, those who hold it, in the order of their grants. */
  holders(lease) {
    return this.#live(lease)
      .filter((ticket) => ticket.granted !== null)
      .sort((a, b) => a.granted - b.granted);
  }

  /** Of one lease, everyone who was there in the last ten minutes, in order of arrival. */
  recent(lease) {
    const oldest = this.now() - KEPT;
    return [...this.tickets.values()]
      .filter((ticket) => ticket.lease === lease && (ticket.ended === null || ticket.ended >= oldest))
      .sort((a, b) => a.arrived - b.arrived || a.order - b.order);
  }

  byRequest(id) {
    return [...this.tickets.values()].findLast((ticket) => ticket.request === id);
  }

  #live(lease) {
    return [...this.live].filter((ticket) => ticket.lease === lease).sort((a, b) => a.order - b.order);
  }

  #ticket(lease, order, name, { request, model, group, mode, arrived }) {
    const key = `${lease}/${name}`;
    let ticket = this.tickets.get(key);
    if (ticket === undefined) {
      ticket = {
        key,
        lease,
        order,
        request,
        model,
        group,
        mode,
        arrived,
        granted: null,
        opened: null,
        ended: null,
        swap: false,
        loads: false,
        overtook: false,
        outcome: null,
        reason: "",
        heard: 0,
        guessed: false,
      };
      this.tickets.set(key, ticket);
      this.live.add(ticket);
    }
    return ticket;
  }

  #end(ticket, at) {
    ticket.ended = at;
    this.live.delete(ticket);
  }

  /** Whoever is let in while a model loads waits for the same loading as the one whose grant was the swap. */
  #grant(ticket, at, swap, overtook) {
    const joins = (other) =>
      other.lease === ticket.lease && other.model === ticket.model && other.loads && other.opened === null;
    Object.assign(ticket, { granted: at, swap, overtook, loads: swap || [...this.live].some(joins) });
  }
}

export function numberOf(id) {
  return Number(id.slice(id.lastIndexOf("-") + 1));
}

export function waited(ticket, now) {
  return Math.max(0, (ticket.granted ?? ticket.ended ?? now) - ticket.arrived);
}

/** What a request does now: waiting, loading, starting, streaming, or ended. */
export function phase(ticket) {
  if (ticket.ended !== null) return "ended";
  if (ticket.granted === null) return "waiting";
  if (ticket.opened !== null) return "streaming";
  return ticket.loads ? "loading" : "starting";
}

/** Its life so far as [phase, from, to], without empty parts. */
export function segments(ticket, now) {
  const end = ticket.ended ?? now;
  const parts = [["waiting", ticket.arrived, ticket.granted ?? end]];
  if (ticket.granted !== null) {
    parts.push([ticket.loads ? "loading" : "starting", ticket.granted, ticket.opened ?? end]);
    if (ticket.opened !== null) parts.push(["streaming", ticket.opened, end]);
  }
  return parts.filter(([, from, to]) => to > from);
}

/** Whether it ended otherwise than by a complete answer. */
export function failed(ticket) {
  return ticket.ended !== null && ticket.outcome !== "done" && ticket.outcome !== "unknown";
}
