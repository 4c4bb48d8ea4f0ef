//! Finished responses, kept in memory.

use serde_json::Value;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

/// Responses that are kept, and about how many bytes of them.
const MAX_KEPT: usize = 1024;
const MAX_BYTES: usize = 64 << 20;

struct Kept {
    id: String,
    response: Value,
    /// The conversation up to and with the response, as chat messages.
    messages: Vec<Value>,
    bytes: usize,
}

/// The last responses; the oldest give way.
#[derive(Default)]
pub struct ResponseStore {
    kept: Mutex<VecDeque<Kept>>,
}

impl ResponseStore {
    pub fn insert(&self, id: String, response: Value, messages: Vec<Value>) {
        let bytes =
            response.to_string().len() + messages.iter().map(|message| message.to_string().len()).sum::<usize>();
        let mut kept = self.lock();
        kept.push_back(Kept { id, response, messages, bytes });
        while kept.len() > MAX_KEPT || kept.iter().map(|kept| kept.bytes).sum::<usize>() > MAX_BYTES {
            kept.pop_front();
        }
    }

    pub fn get(&self, id: &str) -> Option<Value> {
        self.lock().iter().find(|kept| kept.id == id).map(|kept| kept.response.clone())
    }

    /// What a further turn goes on from.
    pub fn conversation(&self, id: &str) -> Option<Vec<Value>> {
        self.lock().iter().find(|kept| kept.id == id).map(|kept| kept.messages.clone())
    }

    /// True when it was there.
    pub fn remove(&self, id: &str) -> bool {
        let mut kept = self.lock();
        let before = kept.len();
        kept.retain(|kept| kept.id != id);
        kept.len() < before
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        self.kept.lock().unwrap_or_else(|e| e.into_inner())
    }
}
