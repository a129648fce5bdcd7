/* Requests to the server that this page came from, with the key where one is set. */

const ROOT = new URL("../../", import.meta.url);
const STORED = "llama-lease-key";

/** What the server said about a request that it did not answer. */
export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function key() {
  return sessionStorage.getItem(STORED) ?? "";
}

export function setKey(value) {
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
}

export function url(path) {
  return new URL(path, ROOT);
}

/** The response, once its head is here. Throws ApiError for an error, TypeError where the server cannot be reached. */
export async function ask(path, { headers = {}, json, key: given = key(), ...options } = {}) {
  const all = { ...headers };
  if (given) all.Authorization = `Bearer ${given}`;
  if (json !== undefined) {
    all["Content-Type"] = "application/json";
    options.body = JSON.stringify(json);
  }
  const response = await fetch(url(path), { cache: "no-store", headers: all, ...options });
  if (response.ok) return response;
  let said = null;
  try {
    said = (await response.json()).error;
  } catch {
    // Not our error object: something between us and the server answered.
  }
  throw new ApiError(response.status, said?.message ?? `${response.status} ${response.statusText}`, said?.code);
}

export async function get(path) {
  return (await ask(path)).json();
}

/** Seconds in the queue, as the head of an answer tells; null where it was sent before they were over. */
export function leaseTime(response) {
  const match = /(?:^|,)\s*lease;dur=([\d.]+)/.exec(response.headers.get("Server-Timing") ?? "");
  return match === null ? null : Number(match[1]) / 1000;
}

/** The events of a text/event-stream as {id, event, data}; comments are yielded as null, since they show life. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let fields = { id: null, event: "message", data: [] };
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (fields.data.length > 0) yield { ...fields, data: fields.data.join("\n") };
          fields = { id: null, event: "message", data: [] };
        } else if (line.startsWith(":")) {
          yield null;
        } else {
          const colon = line.includes(":") ? line.indexOf(":") : line.length;
          const name = line.slice(0, colon);
          const content = line.slice(colon + 1).replace(/^ /, "");
          if (name === "data") fields.data.push(content);
          else if (name === "id" || name === "event") fields[name] = content;
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
