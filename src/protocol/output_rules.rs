//! What shapes a run's output beside its parameters: which tokens may come next, and what the text shows.

use crate::ids::TokenId;
use serde::{Deserialize, Serialize};

/// Says which tokens may come next. An implementation follows one output; [`TokenConstraint::fork`] begins another.
pub trait TokenConstraint: Send {
    /// Sets bit `t % 32` of word `t / 32` for each token t that may follow `output`, and clears all others; an output that
    /// may end allows the end-of-sequence tokens. `output` extends what the last call had. The error ends the run.
    fn allow(&mut self, output: &[TokenId], mask: &mut [u32]) -> Result<(), String>;

    /// The tokens that follow `output` whatever the model says: those that [`Self::allow`] would allow alone, one after
    /// the other. They may be appended without running the model. Empty where the model chooses, or where nobody looked.
    fn forced(&mut self, _output: &[TokenId]) -> Result<Vec<TokenId>, String> {
        Ok(Vec::new())
    }

    /// The same constraint before the first token.
    fn fork(&self) -> Box<dyn TokenConstraint>;
}

/// How the hidden states of a prompt become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The state of the last token.
    Last,
    /// The mean over all tokens.
    Mean,
}

/// Rules of one run. They are not part of recordings: a replay has the tokens.
#[derive(Default)]
pub struct OutputRules {
    /// Every choice follows it.
    pub constraint: Option<Box<dyn TokenConstraint>>,
    /// Special tokens other than those that end the output are part of the text.
    pub shows_special: bool,
    /// The run tells the log-probabilities of its prompt's tokens, with so many alternatives, as
    /// [`super::EngineEvent::PromptLogprobs`].
    pub prompt_logprobs: Option<u8>,
    /// The run gives its prompt's pooled hidden state, as [`super::EngineEvent::Embedding`].
    pub pooling: Option<Pooling>,
}

impl std::fmt::Debug for OutputRules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (is_constrained, shows_special) = (self.constraint.is_some(), self.shows_special);
        write!(f, "OutputRules(constrained: {is_constrained}, shows special tokens: {shows_special})")
    }
}
