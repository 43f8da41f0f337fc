// Numbers for people, as the command line writes them.

export const number = (value) => (value === null || value === undefined ? "" : Curves.number(value));

export function figure(value) {
  if (value === null || value === undefined) return "";
  return Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2).replace("e+", "e") : value.toPrecision(4);
}

export function count(value) {
  return value === null || value === undefined ? "" : Math.round(value).toLocaleString("en");
}

export function bytes(value) {
  if (!value) return "";
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6]])
    if (value >= scale) return `${Number((value / scale).toPrecision(3))} ${unit}`;
  return `${Number((value / 1e3).toPrecision(3))} kB`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value >= 120) return `${Number((value / 60).toPrecision(3))} min`;
  return value >= 1 ? `${Number(value.toPrecision(3))} s` : `${Number((value * 1000).toPrecision(3))} ms`;
}

// Time that is left: 1:02:03, 4:12 or 9 s.
export function clock(value) {
  if (value === null || value === undefined) return "";
  const whole = Math.max(0, Math.round(value));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const two = (part) => String(part).padStart(2, "0");
  if (hours >= 48) return `${Math.round(hours / 24)} days`;
  if (hours) return `${hours}:${two(minutes)}:${two(rest)}`;
  return minutes ? `${minutes}:${two(rest)}` : `${rest} s`;
}

// How long ago something was, by the clock of this machine.
export function ago(time) {
  if (!time) return "";
  const past = Date.now() / 1000 - time;
  if (past < 60) return "now";
  for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]])
    if (past >= size) {
      const number = Math.floor(past / size);
      return `${number} ${unit}${number > 1 ? "s" : ""} ago`;
    }
  return "";
}
