/* Numbers and states in words. */

export function seconds(value) {
  if (value < 0.05) return "0 s";
  if (value < 9.95) return `${value.toFixed(1)} s`;
  return duration(value);
}

/** For what counts up: whole seconds. */
export function duration(value) {
  const whole = Math.max(0, Math.floor(value + 1e-6));
  if (whole < 100) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function limit(value) {
  if (value >= 3600 && value % 3600 === 0) return many(value / 3600, "hour");
  if (value >= 60 && value % 60 === 0) return many(value / 60, "minute");
  return many(value, "second");
}

export function many(count, noun, plural = `${noun}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? noun : plural}`;
}

export function ordinal(count) {
  const tens = count % 100;
  const ending = tens >= 11 && tens <= 13 ? "th" : ({ 1: "st", 2: "nd", 3: "rd" }[count % 10] ?? "th");
  return `${count}${ending}`;
}

export function modelName(model) {
  return model === "*" ? "all models" : model || "no model";
}

export const MODES = { read: "shared", write: "alone", none: "beside" };

export const PHASES = {
  waiting: "waits",
  loading: "loading",
  starting: "starting",
  streaming: "answering",
  ended: "ended",
};

/** How a request ended, for people. */
export function outcome(ticket) {
  switch (ticket.outcome) {
    case null:
      return PHASES[ticket.granted === null ? "waiting" : ticket.opened === null ? "starting" : "streaming"];
    case "done":
      return "done";
    case "error":
      return "failed";
    case "client":
      return "client left";
    case "admin":
      return "cancelled";
    case "max_hold":
      return "held too long";
    case "timeout":
      return "waited too long";
    case "cancelled":
      return { client: "client left", admin: "cancelled", shutdown: "server stopped" }[ticket.reason] ?? "cancelled";
    case "rejected":
      return ticket.reason === "full" ? "queue was full" : "server stopped";
    default:
      return "ended";
  }
}

export function list(names) {
  if (names.length < 2) return names.join("");
  return `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}
