//! Which of the ways to compute a product ([`super::tile`]) is fastest on this adapter.
//!
//! Guarantees: a way is chosen only if it gave the bits of the prior on made-up data, three times, without a NaN, where the
//! prior itself is near the CPU's `reference()`; any other is banned for that product, with the reason. A choice other than
//! the prior was at least 5 % faster. What was not measured in time keeps the prior and can be measured another time.
//!
//! Not attempted: ways that would change the order of a sum; kernels other than products; weights that rotate through
//! memory: a product that is repeated reads them from the last level of cache where they fit.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::tile::{ProductKey, Tile};
use super::weights::{PackedMatrix, WeightError};
use super::{Class, DeviceClass};
use crate::gpu::Gpu;

pub mod decide;
pub mod table;
mod trial;

use trial::Trial;

/// One way of a product, and what was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub tile: Tile,
    /// Median time of a dispatch; `None` where it was not measured.
    pub us: Option<f64>,
    /// Why it must not be taken.
    pub ban: Option<String>,
}

/// What was found about a product.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub key: ProductKey,
    /// The prior first.
    pub candidates: Vec<Candidate>,
    pub chosen: Tile,
}

impl Outcome {
    /// The class's own way stays.
    pub fn is_prior(&self) -> bool {
        self.candidates.first().is_some_and(|prior| prior.tile == self.chosen)
    }
}

/// Measures the products in turn until `budget` is spent, and calls `each` with what was found. Those of one way only are
/// not measured.
pub fn tune(
    gpu: &Gpu,
    keys: &[ProductKey],
    budget: Duration,
    each: &mut dyn FnMut(Outcome),
) -> Result<(), WeightError> {
    let deadline = Instant::now() + budget;
    let (class, pairs) = (Class::of(gpu.caps()), DeviceClass::of(gpu.caps()).multiplies_pairs);
    let mut weights: HashMap<String, (PackedMatrix, Vec<u8>)> = HashMap::new();
    for key in keys {
        let tiles = key.candidates(class, pairs);
        if Instant::now() > deadline {
            return Ok(());
        }
        if tiles.len() == 1 {
            let prior = Candidate { tile: tiles[0], us: None, ban: None };
            each(Outcome { key: *key, candidates: vec![prior], chosen: tiles[0] });
            continue;
        }
        let name = format!("{} {}x{}", key.format.dtype, key.n, key.k);
        if !weights.contains_key(&name) {
            weights.insert(name.clone(), trial::made_up_weights(gpu, key)?);
        }
        let (matrix, bytes) = &weights[&name];
        let mut trial = Trial::new(gpu, *key, matrix, bytes)?;
        let decision = decide::choose(tiles.len(), &mut trial.with(&tiles), &mut || Instant::now() > deadline);
        let Some(decision) = decision else { return Ok(()) };
        let found = tiles.iter().zip(decision.us.iter().zip(decision.bans));
        let candidates = found.map(|(&tile, (&us, ban))| Candidate { tile, us, ban }).collect();
        each(Outcome { key: *key, candidates, chosen: tiles[decision.chosen] });
    }
    Ok(())
}
