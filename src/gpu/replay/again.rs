//! The submit that is expected next, encoded while the last one runs.
//!
//! Steps that decode are alike: what was asked for twice in a row is expected a third time. What differs between them lies in
//! a buffer that is written before each submit, so the commands can be encoded before it is.

use super::{BufferSlice, Encoded, Recording, Timing};

/// What was submitted last, and how it goes on.
#[derive(Debug)]
pub(super) struct Again {
    recording: Recording,
    readback: Vec<BufferSlice>,
    /// Submits in a row that asked for this before the last.
    num_repeats: u32,
    encoded: Option<Encoded>,
}

impl Again {
    pub fn new() -> Again {
        Again { recording: Recording::new("nothing"), readback: Vec::new(), num_repeats: 0, encoded: None }
    }

    /// Sees what is submitted: gives it as it was encoded before, or what was encoded in vain.
    pub fn take(
        &mut self,
        recording: &Recording,
        readback: &[BufferSlice],
        timing: Timing,
    ) -> Result<Encoded, Option<Encoded>> {
        let is_same = self.recording.is_same(recording) && is_same(&self.readback, readback);
        if is_same {
            self.num_repeats = self.num_repeats.saturating_add(1);
        } else {
            self.num_repeats = 0;
            self.recording.clone_from(recording);
            self.readback = readback.to_vec();
        }
        let encoded = self.encoded.take();
        match encoded {
            Some(encoded) if is_same && encoded.timing == timing => Ok(encoded),
            other => Err(other),
        }
    }

    /// What is to be encoded now, if anything.
    pub fn expected(&self) -> Option<(&Recording, &[BufferSlice])> {
        (self.num_repeats > 0 && self.encoded.is_none()).then_some((&self.recording, &self.readback))
    }

    pub fn drop_encoded(&mut self) -> Option<Encoded> {
        self.encoded.take()
    }

    pub fn keep(&mut self, encoded: Encoded) {
        self.encoded = Some(encoded);
    }
}

fn is_same(a: &[BufferSlice], b: &[BufferSlice]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.is_same(b))
}
