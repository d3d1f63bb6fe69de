//! Pieces of a text, passed on while it is generated.

/// A piece of a generated text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextPiece<'a> {
    /// The text; empty if the tokens add none.
    pub text: &'a str,
    /// The tokens since the last piece. A token whose text is not certain yet comes with the piece that has it.
    pub tokens: &'a [u32],
    /// Which part of an answer it is.
    pub kind: PieceKind,
}

/// A part of an answer. Outside of chats, all is content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PieceKind {
    /// The answer.
    Content,
    /// Reasoning before the answer.
    Reasoning,
    /// The name of a tool, with which a call begins.
    ToolName,
    /// More of the arguments of the call that began last, as JSON.
    ToolArguments,
}

impl PieceKind {
    /// The name of the part.
    pub fn name(self) -> &'static str {
        match self {
            PieceKind::Content => "content",
            PieceKind::Reasoning => "reasoning",
            PieceKind::ToolName => "tool-name",
            PieceKind::ToolArguments => "tool-arguments",
        }
    }
}

/// Receives a text while it is generated.
pub trait PieceListener {
    /// A piece of the text. Returning `false` ends the generation.
    fn piece(&mut self, piece: TextPiece) -> bool;

    /// Whether the generation shall go on. Asked before each layer of a pass, which over a prompt may take long.
    fn wants_more(&mut self) -> bool {
        true
    }
}

impl<F: FnMut(TextPiece) -> bool> PieceListener for F {
    fn piece(&mut self, piece: TextPiece) -> bool {
        self(piece)
    }
}
