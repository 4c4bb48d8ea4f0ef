//! What the user wants, as data. Views push commands; [`super::logic::AppCore::apply`] carries them out.

use super::chat::{ChatId, MessageId, RunSettings};
use super::inspect::PrefixCommand;
use super::state::{DockTab, EngineChoices, ThemeChoice, Workspace};
use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq)]
pub enum UiCommand {
    // Chats.
    NewChat,
    /// Shows a chat in the focused pane, or focuses the pane that shows it.
    OpenChat(ChatId),
    /// The chat after (or before) the focused one in the list.
    OpenNeighbour {
        offset: isize,
    },
    RenameChat {
        chat: ChatId,
        title: String,
    },
    DeleteChat(ChatId),
    UndoDelete,
    SetSessionFilter(String),
    // Messages.
    SetDraft {
        chat: ChatId,
        text: String,
    },
    /// Sends the draft, or the draft of the focused pane to all panes where that is switched on.
    Send(ChatId),
    SendText {
        chat: ChatId,
        text: String,
    },
    Stop(ChatId),
    StopAll,
    /// Writes another answer beside this one; also retries one that failed.
    Regenerate {
        chat: ChatId,
        message: MessageId,
    },
    StartEdit {
        chat: ChatId,
        message: MessageId,
    },
    EditLast(ChatId),
    SetEditText(String),
    CancelEdit,
    /// Sends the edited text as a new branch.
    SubmitEdit,
    SelectSibling {
        chat: ChatId,
        message: MessageId,
        offset: isize,
    },
    BranchAsChat {
        chat: ChatId,
        message: MessageId,
    },
    Copy(String),
    CopyLastAnswer,
    RegenerateLast,
    SetSettings {
        chat: ChatId,
        settings: Box<RunSettings>,
    },
    /// Answers "this turn does not fit": leave the oldest turns out.
    DropOldest(ChatId),
    /// Answers "this turn does not fit": take the turn back into the composer.
    CancelTurn(ChatId),
    // Panes.
    Split,
    OpenInSplit(ChatId),
    ClosePane(usize),
    CloseFocusedPane,
    FocusPane(usize),
    SetSendToAll(bool),
    // Shell.
    ShowWorkspace(Workspace),
    ToggleSessionList,
    ToggleDock,
    SetDockTab(DockTab),
    CloseOverlays,
    OpenPalette,
    SetPalette {
        query: String,
        selected: usize,
    },
    ClosePalette,
    SetTheme(ThemeChoice),
    DismissNotice,
    SetAbout(bool),
    // Models.
    LoadDefaultModel,
    LoadModel(PathBuf),
    CancelLoad,
    Unload,
    /// Policies for the next load.
    SetEngineChoices(EngineChoices),
    /// Loads the present model again, with the policies that were chosen.
    Reload,
    ScanModels,
    /// Opens the system's file dialog.
    PickModelFile,
    // Inspect.
    /// Shows the engine at this step.
    InspectStep(u64),
    /// Keeps the blocks of this chat's system prompt from being evicted.
    PinSystemPrompt(ChatId),
    Prefix(PrefixCommand),
    RunDemo,
}

/// What only the window can do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    Copy(String),
    /// The step to look at.
    InspectStep(u64),
    Close,
}
