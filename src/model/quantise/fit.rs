//! Codes, scale and zero point of a group.

use half::{bf16, f16};

/// How the numbers of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleType {
    F32,
    F16,
    BF16,
}

impl ScaleType {
    /// What the file will give back.
    pub fn round(self, x: f32) -> f32 {
        match self {
            ScaleType::F32 => x,
            ScaleType::F16 => f16::from_f32(x).to_f32(),
            ScaleType::BF16 => bf16::from_f32(x).to_f32(),
        }
    }

    pub fn push(self, x: f32, out: &mut Vec<u8>) {
        match self {
            ScaleType::F32 => out.extend(x.to_le_bytes()),
            ScaleType::F16 => out.extend(f16::from_f32(x).to_le_bytes()),
            ScaleType::BF16 => out.extend(bf16::from_f32(x).to_le_bytes()),
        }
    }
}

/// `w = scale * (code - zero)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grid {
    pub scale: f32,
    pub zero: u8,
}

/// Ranges that are tried: this many, each narrower by a fiftieth, at both ends and at either.
const RANGES: u32 = 20;

/// Rounds `w` to codes of so many bits and gives their grid. With importances the best of several ranges is taken.
pub fn fit(w: &[f32], importance: Option<&[f32]>, bits: u32, store: ScaleType, codes: &mut [u8]) -> Grid {
    let whole = grid(w, (1.0, 1.0), bits, store);
    let Some(importance) = importance else {
        encode(w, whole, bits, codes);
        return whole;
    };
    let mut best = (error(w, importance, whole, bits), whole);
    let mut consider = |grid: Grid| {
        let error = error(w, importance, grid, bits);
        if error < best.0 {
            best = (error, grid);
        }
    };
    let parts = (0..RANGES).map(|i| 1.0 - 0.02 * i as f32);
    // A symmetric range has one end.
    let ranges = parts.flat_map(|p| [(p, p), (1.0, p), (p, 1.0)].into_iter().take(if bits == 8 { 1 } else { 3 }));
    for range in ranges {
        let narrow = grid(w, range, bits, store);
        consider(narrow);
        encode(w, narrow, bits, codes);
        let (mut over, mut under) = (0.0f64, 0.0f64);
        for ((&w, &code), &importance) in w.iter().zip(codes.iter()).zip(importance) {
            let step = f64::from(code) - f64::from(narrow.zero);
            over += f64::from(importance) * f64::from(w) * step;
            under += f64::from(importance) * step * step;
        }
        let scale = store.round((over / under) as f32);
        if scale.is_finite() && scale > 0.0 {
            consider(Grid { scale, ..narrow });
        }
    }
    encode(w, best.1, bits, codes);
    best.1
}

/// The grid over a part of the range of `w` below 0 and a part of that above.
fn grid(w: &[f32], (below, above): (f32, f32), bits: u32, store: ScaleType) -> Grid {
    let (low, high) = w.iter().fold((0.0f32, 0.0f32), |(low, high), &w| (low.min(w), high.max(w)));
    let (low, high) = (low * below, high * above);
    let top = (1u32 << bits) - 1;
    let scale = match bits {
        8 => low.abs().max(high) / 127.0,
        _ => (high - low) / top as f32,
    };
    let scale = store.round(scale);
    if !scale.is_finite() || scale <= 0.0 {
        return Grid { scale: 1.0, zero: 1 << (bits - 1) };
    }
    let zero = if bits == 8 { 128.0 } else { (-low / scale).round().clamp(0.0, top as f32) };
    Grid { scale, zero: zero as u8 }
}

fn code(w: f32, grid: Grid, bits: u32) -> u8 {
    ((w / grid.scale).round() + f32::from(grid.zero)).clamp(0.0, ((1u32 << bits) - 1) as f32) as u8
}

fn encode(w: &[f32], grid: Grid, bits: u32, codes: &mut [u8]) {
    codes.iter_mut().zip(w).for_each(|(out, &w)| *out = code(w, grid, bits));
}

fn error(w: &[f32], importance: &[f32], grid: Grid, bits: u32) -> f64 {
    let of = |(&w, &importance): (&f32, &f32)| {
        let got = grid.scale * (f32::from(code(w, grid, bits)) - f32::from(grid.zero));
        f64::from(importance) * f64::from(w - got).powi(2)
    };
    w.iter().zip(importance).map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(seed: u32) -> Vec<f32> {
        (0..64u32).map(|i| ((i * 2_654_435_761 + seed * 97) >> 8) as f32 / (1 << 23) as f32 - 0.9).collect()
    }

    #[test]
    fn a_code_is_the_nearest_step_and_zero_is_exact() {
        for (bits, seed) in [(4, 1), (8, 1), (4, 5), (8, 5)] {
            let w = weights(seed);
            let mut codes = vec![0; w.len()];
            let grid = fit(&w, None, bits, ScaleType::F16, &mut codes);
            for (w, &code) in w.iter().zip(&codes) {
                let got = grid.scale * (f32::from(code) - f32::from(grid.zero));
                assert!((got - w).abs() <= grid.scale * 0.52, "{bits} bits: {got} for {w} in steps of {}", grid.scale);
            }
            let mut codes = vec![1; 32];
            let grid = fit(&[0.0; 32], None, bits, ScaleType::BF16, &mut codes);
            assert!(grid.scale.is_finite() && codes.iter().all(|&c| c == grid.zero));
        }
    }

    #[test]
    fn the_search_lessens_the_weighted_error() {
        let mut w = weights(3);
        w[7] = 3.0;
        let importance: Vec<f32> = (0..64).map(|i| if i == 7 { 1e-4 } else { 1.0 }).collect();
        let mut codes = vec![0; 64];
        let nearest = fit(&w, None, 4, ScaleType::F16, &mut codes);
        let searched = fit(&w, Some(&importance), 4, ScaleType::F16, &mut codes);
        let [before, after] = [nearest, searched].map(|grid| error(&w, &importance, grid, 4));
        assert!(after < 0.8 * before, "{after} {before}");
    }
}
