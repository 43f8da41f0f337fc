import { empty, h } from "./dom.js";
export async function showPlan(place) { place.append(h("h1", {}, "Plan"), empty("")); }
