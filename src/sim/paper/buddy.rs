//! A buddy allocator (Knowlton 1965): what the paper assumes of systems that keep a request's K and V in one piece.
//!
//! Guarantees: regions handed out never overlap; a region is a power of two long and aligned to its length; freeing
//! everything makes the memory whole again. A memory whose length is no power of two is cut into falling powers.

use std::collections::BTreeSet;

/// Slots of one memory, given out in powers of two.
#[derive(Debug)]
pub struct Buddy {
    free: Vec<BTreeSet<u32>>, // [order] offsets of free regions of 2^order slots
}

/// A region that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub offset: u32,
    pub order: u32,
}

impl Region {
    pub fn num_slots(&self) -> u32 {
        1 << self.order
    }
}

impl Buddy {
    pub fn new(num_slots: u32) -> Self {
        let mut free = vec![BTreeSet::new(); 32];
        let mut offset = 0;
        for order in (0..32).rev().filter(|order| num_slots >> order & 1 == 1) {
            free[order].insert(offset);
            offset += 1 << order;
        }
        Buddy { free }
    }

    /// The smallest free region that holds `len` slots, split down as far as it goes; the lowest among equals.
    pub fn allocate(&mut self, len: u32) -> Option<Region> {
        let order = len.max(1).checked_next_power_of_two()?.trailing_zeros();
        let found = (order..32).find(|order| !self.free[*order as usize].is_empty())?;
        let offset = self.free[found as usize].pop_first().expect("it is not empty");
        for split in (order..found).rev() {
            self.free[split as usize].insert(offset + (1 << split));
        }
        Some(Region { offset, order })
    }

    /// Takes a region back and joins it with its buddy for as long as that is free.
    pub fn free(&mut self, region: Region) {
        let Region { mut offset, mut order } = region;
        while order < 31 && self.free[order as usize].remove(&(offset ^ (1 << order))) {
            offset &= !(1 << order);
            order += 1;
        }
        let is_new = self.free[order as usize].insert(offset);
        assert!(is_new, "the region at {offset} is given back twice");
    }

    pub fn num_free(&self) -> u32 {
        self.free.iter().enumerate().map(|(order, offsets)| (offsets.len() as u32) << order).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::rng::Rng;

    #[test]
    fn seven_contexts_of_2048_fit_into_15700_slots() {
        let mut buddy = Buddy::new(15_700);
        let regions: Vec<Region> = std::iter::from_fn(|| buddy.allocate(2048)).collect();
        assert_eq!((regions.len(), buddy.num_free()), (7, 15_700 - 7 * 2048));
    }

    #[test]
    fn lengths_are_rounded_up_to_powers_of_two() {
        let mut buddy = Buddy::new(64);
        let lens: Vec<u32> = [1, 3, 17].map(|len| buddy.allocate(len).expect("there is room").num_slots()).into();
        assert_eq!((lens, buddy.num_free()), (vec![1, 4, 32], 64 - 37));
        assert_eq!(buddy.allocate(17), None, "27 slots are free, but not in one piece");
        assert_eq!(buddy.allocate(0).map(|r| r.num_slots()), Some(1));
    }

    #[test]
    fn random_use_never_overlaps_and_ends_whole() {
        for seed in 0..50 {
            let mut rng = Rng::new(seed);
            let num_slots = rng.range(1, 4000);
            let mut buddy = Buddy::new(num_slots);
            let whole = buddy.free.clone();
            let mut held: Vec<Region> = Vec::new();
            for _ in 0..400 {
                if rng.percent(55) {
                    held.extend(buddy.allocate(rng.range(1, 300)));
                } else if !held.is_empty() {
                    buddy.free(held.swap_remove(rng.range(0, held.len() as u32 - 1) as usize));
                }
                let mut owner = vec![false; num_slots as usize];
                for region in &held {
                    assert_eq!(region.offset % region.num_slots(), 0, "regions are aligned to their length");
                    for slot in &mut owner[region.offset as usize..(region.offset + region.num_slots()) as usize] {
                        assert!(!std::mem::replace(slot, true), "two regions overlap");
                    }
                }
                assert_eq!(buddy.num_free() + held.iter().map(Region::num_slots).sum::<u32>(), num_slots);
            }
            held.into_iter().for_each(|region| buddy.free(region));
            assert_eq!(buddy.free, whole, "everything joined again");
        }
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn giving_a_region_back_twice_is_caught() {
        let mut buddy = Buddy::new(24);
        let regions = [buddy.allocate(8), buddy.allocate(8)].map(|r| r.expect("there is room"));
        buddy.free(regions[0]);
        buddy.free(regions[0]);
    }
}
