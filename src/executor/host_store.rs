//! Host memory for the content of blocks: one place per block, allocated when it is first filled.
//!
//! Guarantees: a place is replaced as a whole, so it never holds half of one block and half of another.

use super::ExecError;
use crate::ids::HostSlot;

/// The bytes of each place; empty where nothing was stored yet.
#[derive(Debug, Default)]
pub struct HostStore {
    bytes_per_block: usize,
    slots: Vec<Vec<u8>>,
}

impl HostStore {
    pub fn new(num_slots: u32, bytes_per_block: u64) -> Self {
        HostStore { bytes_per_block: bytes_per_block as usize, slots: vec![Vec::new(); num_slots as usize] }
    }

    pub fn num_slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// `None` where nothing was stored.
    pub fn get(&self, slot: HostSlot) -> Option<&[u8]> {
        self.slots.get(slot.idx()).filter(|bytes| !bytes.is_empty()).map(Vec::as_slice)
    }

    /// The place's memory, to be filled in full.
    pub fn get_mut(&mut self, slot: HostSlot) -> &mut [u8] {
        let bytes = &mut self.slots[slot.idx()];
        bytes.resize(self.bytes_per_block, 0);
        bytes
    }

    /// Replaces the content of a place.
    pub fn put(&mut self, slot: HostSlot, bytes: &[u8]) -> Result<(), ExecError> {
        if slot.0 >= self.num_slots() || bytes.len() != self.bytes_per_block {
            let (len, size) = (bytes.len(), self.bytes_per_block);
            return Err(ExecError::Rejected(format!("{len} bytes for host slot {slot}, a block has {size}")));
        }
        self.get_mut(slot).copy_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_takes_whole_blocks_only() {
        let mut store = HostStore::new(2, 4);
        assert_eq!(store.get(HostSlot(0)), None);
        assert!(store.put(HostSlot(2), &[1, 2, 3, 4]).is_err());
        assert!(store.put(HostSlot(1), &[1, 2, 3]).is_err());
        store.put(HostSlot(1), &[1, 2, 3, 4]).expect("a whole block");
        assert_eq!((store.get(HostSlot(1)), store.get(HostSlot(0))), (Some(&[1u8, 2, 3, 4][..]), None));
    }
}
