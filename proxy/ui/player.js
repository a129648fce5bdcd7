/*
 * Plays raw audio (16-bit little-endian mono) while it arrives. Each piece is scheduled behind the one before on the audio
 * clock, so that pieces join without a seam; when the network is late, what comes next starts a little later and the
 * gap is counted.
 */

const LEAD = 0.15; // seconds between the first piece and its sound: room for the second to arrive
const PIECE = 0.06;
const PEAK = 0.05;

export class Player {
  constructor(rate) {
    this.rate = rate;
    this.context = new AudioContext({ sampleRate: rate });
    this.rest = new Uint8Array(0);
    this.peaks = [];
    this.scheduled = 0; // seconds of audio
    this.pieces = 0;
    this.gaps = 0;
    this.next = 0; // on the audio clock
    this.begun = null;
    this.last = null;
    this.idle = 0; // seconds of silence in gaps
  }

  /** Seconds of audio that have been heard. */
  get heard() {
    if (this.begun === null) return 0;
    return Math.max(0, Math.min(this.scheduled, this.context.currentTime - this.begun - this.idle));
  }

  /** More bytes, however they are cut. */
  push(bytes) {
    const all = new Uint8Array(this.rest.length + bytes.length);
    all.set(this.rest);
    all.set(bytes, this.rest.length);
    const even = all.length - (all.length % 2);
    if (even < PIECE * this.rate * 2) {
      this.rest = all;
      return;
    }
    this.rest = all.slice(even);
    this.#schedule(all.subarray(0, even));
  }

  /** Nothing more comes: resolves when the last sound has been heard. */
  async end() {
    if (this.rest.length >= 2) this.#schedule(this.rest.subarray(0, this.rest.length - (this.rest.length % 2)));
    this.rest = new Uint8Array(0);
    const last = this.last;
    if (last !== null && this.context.state !== "closed") {
      await new Promise((resolve) => {
        this.stopped = resolve;
        last.addEventListener("ended", resolve);
      });
    }
    await this.close();
  }

  async close() {
    this.stopped?.();
    if (this.context.state !== "closed") await this.context.close();
  }

  #schedule(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
    const buffer = this.context.createBuffer(1, bytes.length / 2, this.rate);
    const samples = buffer.getChannelData(0);
    for (let index = 0; index < samples.length; index += 1) samples[index] = view.getInt16(index * 2, true) / 32768;
    this.#measure(samples);
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    const now = this.context.currentTime;
    if (this.begun === null) {
      this.begun = this.next = now + LEAD;
    } else if (this.next < now) {
      this.gaps += 1;
      this.idle += now + LEAD - this.next;
      this.next = now + LEAD;
    }
    source.start(this.next);
    this.next += buffer.duration;
    this.scheduled += buffer.duration;
    this.pieces += 1;
    this.last = source;
  }

  #measure(samples) {
    const step = Math.round(PEAK * this.rate);
    for (let start = 0; start < samples.length; start += step) {
      let peak = 0;
      for (let index = start; index < Math.min(start + step, samples.length); index += 1)
        peak = Math.max(peak, Math.abs(samples[index]));
      this.peaks.push(peak);
    }
  }
}
