//! The content of a message: texts and images, in order.

use std::sync::Arc;

use serde_json::{Value, json};

use super::image::RequestImage;

/// What a message says and shows.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Content(Vec<Piece>);

#[derive(Clone, PartialEq, Debug)]
enum Piece {
    Text(String),
    Image(Arc<RequestImage>),
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Content(vec![Piece::Text(text.to_owned())])
    }
}

impl From<RequestImage> for Content {
    fn from(image: RequestImage) -> Self {
        Content(vec![Piece::Image(Arc::new(image))])
    }
}

impl Content {
    /// Adds what follows; a text begins on a new line behind another text.
    pub fn push(&mut self, next: Content) {
        for piece in next.0 {
            match (self.0.last_mut(), piece) {
                (Some(Piece::Text(text)), Piece::Text(next)) => {
                    text.push('\n');
                    text.push_str(&next);
                }
                (_, piece) => self.0.push(piece),
            }
        }
    }

    /// Puts a text before all, on the same line.
    pub fn prefixed(mut self, prefix: &str) -> Self {
        match self.0.first_mut() {
            Some(Piece::Text(text)) => text.insert_str(0, prefix),
            _ => self.0.insert(0, Piece::Text(prefix.to_owned())),
        }
        self
    }

    /// The texts alone.
    pub fn into_text(self) -> String {
        let mut texts = Content::default();
        self.0
            .into_iter()
            .filter(|piece| matches!(piece, Piece::Text(_)))
            .for_each(|text| texts.push(Content(vec![text])));
        match texts.0.pop() {
            Some(Piece::Text(text)) => text,
            _ => String::new(),
        }
    }

    /// As messages have it: a text, or with images a list of parts, each image with its index in `images`, to which it
    /// is added.
    pub fn into_value(self, images: &mut Vec<Arc<RequestImage>>) -> Value {
        if !self.0.iter().any(|piece| matches!(piece, Piece::Image(_))) {
            return self.into_text().into();
        }
        let part = |piece| match piece {
            Piece::Text(text) => json!({"type": "text", "text": text}),
            Piece::Image(image) => {
                images.push(image);
                json!({"type": "image", "index": images.len() - 1})
            }
        };
        self.0.into_iter().map(part).collect()
    }
}

/// The index of the image that a part of a message's content is.
pub fn image_index(part: &Value) -> Option<usize> {
    if part["type"] == "image" { usize::try_from(part["index"].as_u64()?).ok() } else { None }
}

/// The parts of a message's content; none if it is a text.
pub fn parts_of(message: &Value) -> &[Value] {
    message["content"].as_array().map_or(&[], Vec::as_slice)
}

/// The text that parts become in which `image` says what stands for the image of an index. Texts of parts follow each
/// other on new lines where none of them is an image.
pub fn flattened(parts: &[Value], image: impl Fn(usize) -> String) -> String {
    let (mut text, mut after_text) = (String::new(), false);
    for part in parts {
        match (image_index(part), part["text"].as_str()) {
            (Some(index), _) => (text, after_text) = (text + &image(index), false),
            (None, Some(own)) => {
                if after_text {
                    text.push('\n');
                }
                text.push_str(own);
                after_text = true;
            }
            (None, None) => {}
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::author::Author;

    fn image() -> Content {
        RequestImage::of_text("images[0]", "aGk=", Author::Message).into()
    }

    #[test]
    fn texts_are_lines_and_images_stand_between_them() {
        let mut content = Content::default();
        for next in ["a", "b"].map(Content::from).into_iter().chain([image(), "c".into()]) {
            content.push(next);
        }
        let text = |text: &str| json!({"type": "text", "text": text});
        let mut images = vec![];
        let want = json!([text("a\nb"), {"type": "image", "index": 0}, text("c")]);
        assert_eq!(content.clone().into_value(&mut images), want);
        let shown = image().prefixed("Error: ").into_value(&mut images);
        assert_eq!(shown, json!([text("Error: "), {"type": "image", "index": 1}]));
        assert_eq!((images.len(), content.clone().into_text().as_str()), (2, "a\nb\nc"));
        assert_eq!(flattened(parts_of(&json!({"content": want})), |index| format!("<{index}>")), "a\nb<0>c");
        assert_eq!(Content::from("x").prefixed("y").into_value(&mut images), json!("yx"));
        assert_eq!(Content::default().into_value(&mut images), json!(""));
    }
}
