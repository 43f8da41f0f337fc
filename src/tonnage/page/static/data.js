import { empty, h } from "./dom.js";
export async function showData(place) { place.append(h("h1", {}, "Data"), empty("")); }
