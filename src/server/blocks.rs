//! An answer as a row of blocks (reasoning, text, calls), as the Responses and the Messages API have it.
//!
//! Guarantees: blocks open and close one after the other, in the order of the answer.

use super::reducer::Part;

/// A piece of an answer with a place of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    Reasoning(String),
    Text(String),
    Call { id: String, name: String, arguments: String },
}

/// What happened to the block of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    Open(usize),
    /// Text was added.
    Delta(usize, String),
    Close(usize),
}

/// The blocks so far.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    pub all: Vec<Block>,
    /// The last one may still grow.
    is_open: bool,
}

impl Blocks {
    /// Takes the next part.
    pub fn take(&mut self, part: Part, events: &mut Vec<BlockEvent>) {
        match part {
            Part::ToolCall { id, name, .. } => self.open(Block::Call { id, name, arguments: String::new() }, events),
            Part::Arguments { text, .. } => self.add(text, events),
            Part::Reasoning(text) => {
                if !(self.is_open && matches!(self.all.last(), Some(Block::Reasoning(_)))) {
                    self.open(Block::Reasoning(String::new()), events);
                }
                self.add(text, events);
            }
            Part::Content(text) => {
                if !(self.is_open && matches!(self.all.last(), Some(Block::Text(_)))) {
                    self.open(Block::Text(String::new()), events);
                }
                self.add(text, events);
            }
        }
    }

    /// The end of the answer.
    pub fn close(&mut self, events: &mut Vec<BlockEvent>) {
        if std::mem::replace(&mut self.is_open, false) {
            events.push(BlockEvent::Close(self.all.len() - 1));
        }
    }

    fn open(&mut self, block: Block, events: &mut Vec<BlockEvent>) {
        self.close(events);
        self.all.push(block);
        self.is_open = true;
        events.push(BlockEvent::Open(self.all.len() - 1));
    }

    fn add(&mut self, text: String, events: &mut Vec<BlockEvent>) {
        let at = self.all.len().saturating_sub(1);
        match self.all.last_mut() {
            Some(Block::Reasoning(all) | Block::Text(all) | Block::Call { arguments: all, .. }) => all.push_str(&text),
            None => return,
        }
        events.push(BlockEvent::Delta(at, text));
    }
}
