//! What is done to valid files: bytes set, flipped, cut, removed, repeated and inserted; JSON values replaced by odd ones.

use serde_json::{Value, json};

/// SplitMix64.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Pieces that parsers stumble over.
const PIECES: [&[u8]; 16] = [
    b"-1",
    b"99999999999999999999",
    b"1e400",
    b"null",
    b"{}",
    b"[[[[[[[[",
    b"\"\"",
    b"\\ud800",
    b"{{ ",
    b"{% for x in range(1000000000) %}",
    b"{% endif %}",
    b" | tojson | tojson",
    &[0xff; 8],
    &[0; 8],
    &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0],
    &[0, 0, 0, 0, 0, 0, 0, 0x80],
];

/// A copy with one to four faults among its first `within` bytes.
pub fn damaged_bytes(bytes: &[u8], within: usize, rng: &mut Rng) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..1 + rng.below(4) {
        if out.is_empty() {
            break;
        }
        let at = rng.below(within.clamp(1, out.len()));
        match rng.below(8) {
            0 => out[at] = rng.next() as u8,
            1 => out[at] ^= 1 << rng.below(8),
            2 => out[at] = out[at].wrapping_add(1),
            3 if rng.below(4) == 0 => out.truncate(at),
            4 => _ = out.drain(at..(at + 1 + rng.below(40)).min(out.len())),
            5 => {
                let piece = out[at..(at + 1 + rng.below(200)).min(out.len())].to_vec();
                let to = rng.below(within.clamp(1, out.len()));
                out.splice(to..to, piece);
            }
            6 => {
                let piece = PIECES[rng.below(PIECES.len())];
                let end = (at + piece.len()).min(out.len());
                out.splice(at..end, piece.iter().copied());
            }
            _ => {
                let piece = PIECES[rng.below(PIECES.len())];
                out.splice(at..at, piece.iter().copied());
            }
        }
    }
    out
}

/// A copy in which one to three values are others, are gone, or stand twice.
pub fn damaged_json(bytes: &[u8], rng: &mut Rng) -> Vec<u8> {
    let Ok(mut value) = serde_json::from_slice::<Value>(bytes) else { return bytes.to_vec() };
    for _ in 0..1 + rng.below(3) {
        // Large lists would take all the hits: half of the time only what lies near the root is meant.
        let depth = if rng.below(2) == 0 { 2 } else { usize::MAX };
        let num = count(&value, depth);
        change(&mut value, depth, &mut rng.below(num.max(1)), rng);
    }
    serde_json::to_vec(&value).expect("a value is JSON")
}

fn count(value: &Value, depth: usize) -> usize {
    let children = |n: usize, inner: &mut dyn Iterator<Item = &Value>| {
        if depth == 0 { 0 } else { n + inner.map(|v| count(v, depth - 1)).sum::<usize>() }
    };
    match value {
        Value::Array(list) => children(list.len(), &mut list.iter()),
        Value::Object(map) => children(map.len(), &mut map.values()),
        _ => 0,
    }
}

/// Changes the `left`-th value below this one; true once it is done.
fn change(value: &mut Value, depth: usize, left: &mut usize, rng: &mut Rng) -> bool {
    if depth == 0 {
        return false;
    }
    match value {
        Value::Array(list) if *left < list.len() => {
            let at = *left;
            match rng.below(4) {
                0 => _ = list.remove(at),
                1 => list.insert(at, list[at].clone()),
                _ => list[at] = odd(&list[at], rng),
            }
            return true;
        }
        Value::Object(map) if *left < map.len() => {
            let key = map.keys().nth(*left).expect("counted").clone();
            if rng.below(4) == 0 {
                map.remove(&key);
            } else {
                map[&key] = odd(&map[&key], rng);
            }
            return true;
        }
        Value::Array(list) => *left -= list.len(),
        Value::Object(map) => *left -= map.len(),
        _ => return false,
    }
    match value {
        Value::Array(list) => list.iter_mut().any(|v| change(v, depth - 1, left, rng)),
        Value::Object(map) => map.values_mut().any(|v| change(v, depth - 1, left, rng)),
        _ => false,
    }
}

/// Something else than `value`, often of its kind.
fn odd(value: &Value, rng: &mut Rng) -> Value {
    let near = match value {
        Value::Number(n) => n.as_f64().unwrap_or(0.0),
        _ => 0.0,
    };
    match rng.below(18) {
        0 => Value::Null,
        1 => json!(-1),
        2 => json!(0),
        3 => json!(1),
        4 => json!(u64::MAX),
        5 => json!(u32::MAX),
        6 => json!(1e308),
        7 => json!(near as i64 + 1),
        8 => json!(near as i64 - 1),
        9 => json!(near * 2.0),
        10 => json!((near as i64) << rng.below(20)),
        11 => json!(""),
        12 => json!("\u{1F600}(?:a+)+$"),
        13 => json!([]),
        14 => json!({}),
        15 => json!(true),
        16 => json!([value.clone(), value.clone()]),
        _ => json!({"type": value.clone()}),
    }
}

/// Bytes as tiktoken files write them.
pub fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = |chunk: &[u8]| {
        let word = chunk.iter().fold(0u32, |w, &b| w << 8 | u32::from(b)) << (8 * (3 - chunk.len()));
        let of = |i: usize| if i <= chunk.len() { DIGITS[(word >> (18 - 6 * i)) as usize & 63] as char } else { '=' };
        (0..4).map(of).collect::<String>()
    };
    bytes.chunks(3).map(digits).collect()
}
