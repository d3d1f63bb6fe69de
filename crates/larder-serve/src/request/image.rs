//! An image of a request: where its bytes are, and the picture that a model has seen in them.

use std::sync::Arc;

use axum::http::StatusCode;
use larder_engine::{Picture, PictureTextError, Sight, SightError, base64_of_picture, picture_of_base64};
use tokio::sync::OwnedSemaphorePermit;

use super::author::Author;
use super::fields::Fields;
use super::table::{Field, Kind, Object, field};
use super::unsupported::unread;
use crate::error::{ApiError, Result};
use crate::fetch::{FetchError, PictureUrl};

/// The most images of a request.
pub const IMAGES_MAX: usize = 100;
/// Seconds after which a client may ask again when there is no memory for its pictures.
const FULL_SECONDS: u64 = 5;

/// The fields of parts that are images.
pub static IMAGE_FIELDS: &[Field] = &[
    field(
        "image_url",
        Kind::Either(&URLS),
        "the picture of `image_url` and `input_image`: a data: URL, base64, or an address",
    ),
    unread("detail", "ignored: pictures are read in full"),
];

static URLS: [Kind; 2] = [Kind::Text, Kind::Object(&IMAGE_URL)];

static IMAGE_URL: Object = Object {
    name: "ImageUrl",
    groups: &[&[
        field("url", Kind::Text, "a data: URL, base64, or an address of a host that `--image-urls` names"),
        unread("detail", "ignored: pictures are read in full"),
    ]],
};

/// An image as a request has it.
#[derive(Clone, PartialEq, Debug)]
pub struct RequestImage {
    /// The field that it is in.
    pub field: String,
    /// Whose it is.
    pub author: Author,
    /// Where its file is, or why there is none.
    source: Result<ImageSource>,
}

/// Where the file of an image is.
#[derive(Clone, PartialEq)]
enum ImageSource {
    /// In the request, in base64.
    Base64(String),
    /// On another server.
    Url(PictureUrl),
}

/// A file is too long to be shown.
impl std::fmt::Debug for ImageSource {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            ImageSource::Base64(text) => write!(f, "{} bytes", text.len()),
            ImageSource::Url(url) => write!(f, "{url:?}"),
        }
    }
}

/// A picture that a model has read, with the file that it is read from again when it has to be encoded.
#[derive(Debug)]
pub struct SeenPicture {
    /// The picture, without what a tower makes of it.
    pub picture: Picture,
    /// Its file.
    pub file: Vec<u8>,
    /// The place of all files of the request in memory.
    _room: Arc<OwnedSemaphorePermit>,
}

/// The pictures of a request's images, in their order; none before a model has read them.
#[derive(Clone, Debug, Default)]
pub struct SeenPictures(pub Arc<[Arc<SeenPicture>]>);

impl PartialEq for SeenPictures {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().map(|seen| seen.picture.hash).eq(other.0.iter().map(|seen| seen.picture.hash))
    }
}

impl RequestImage {
    /// The image of a part, under the names of all APIs.
    pub fn of_part(part: &Fields, author: Author) -> Result<Self> {
        let text = match part.string("type") {
            Some("image") => source_of(part)?,
            _ => url_of(part)?,
        };
        Ok(RequestImage::of_text(part.path(), text.unwrap_or_default(), author))
    }

    /// The image of a text: base64, a data: URL, or an address.
    pub fn of_text(field: &str, text: &str, author: Author) -> Self {
        RequestImage { field: field.to_owned(), author, source: source(field, text) }
    }

    /// Bytes that its file has at most, if it came with the request.
    pub fn bytes(&self) -> usize {
        match &self.source {
            Ok(ImageSource::Base64(text)) => text.len() / 4 * 3 + 3,
            _ => 0,
        }
    }

    /// The address of its file, if that is on another server.
    pub fn url(&self) -> Result<Option<&PictureUrl>> {
        match self.source.as_ref().map_err(ApiError::clone)? {
            ImageSource::Url(url) => Ok(Some(url)),
            ImageSource::Base64(_) => Ok(None),
        }
    }

    /// Reads the file, which `fetched` is if it was on another server.
    pub fn read(
        &self,
        fetched: Option<Vec<u8>>,
        sight: &dyn Sight,
        room: Arc<OwnedSemaphorePermit>,
    ) -> Result<SeenPicture> {
        let file = match fetched {
            Some(file) => file,
            None => self.decoded(sight.most_bytes())?,
        };
        let picture = sight.look(&file).map_err(|error| sight_error(&error, Some(&self.field)))?;
        let picture = Picture { encoded: None, ..picture };
        Ok(SeenPicture { picture, file, _room: room })
    }

    /// The file of at most `most` bytes that came with the request.
    fn decoded(&self, most: usize) -> Result<Vec<u8>> {
        let text = match self.source.as_ref().map_err(ApiError::clone)? {
            ImageSource::Base64(text) => text,
            ImageSource::Url(_) => return Err(self.unfetched(FetchError::Off)),
        };
        if self.bytes() > most.saturating_add(5) {
            return Err(refused(&self.field, &FetchError::TooLarge(most).to_string()));
        }
        picture_of_base64(text).map_err(|error| refused(&self.field, &error.to_string()))
    }

    /// The error of a file that is not fetched.
    pub fn unfetched(&self, why: FetchError) -> ApiError {
        let refused = refused(&self.field, &why.to_string());
        if why != FetchError::NoRoom {
            return refused;
        }
        let full = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "pictures_full", refused.message);
        ApiError { retry_after: Some(FULL_SECONDS), ..full.with_param(&self.field) }
    }
}

/// The error of a picture that is not seen.
pub fn sight_error(error: &SightError, field: Option<&str>) -> ApiError {
    match (error, field) {
        (SightError::Refused(why), Some(field)) => refused(field, why),
        (SightError::Refused(why), None) => ApiError::bad_request(format!("A picture cannot be read: {why}.")),
        (SightError::Failed(why), _) => ApiError::engine_failed(format!("A picture could not be encoded: {why}.")),
    }
}

fn refused(field: &str, why: &str) -> ApiError {
    ApiError::invalid_field(field, "invalid_image", format!("Invalid value for '{field}': {why}."))
}

/// The text of a source of Anthropic's API.
fn source_of<'a>(part: &Fields<'a>) -> Result<Option<&'a str>> {
    let Some(source) = part.object("source")? else { return Ok(None) };
    Ok(match source.string("type") {
        Some("url") => source.string("url"),
        Some("base64") | None => source.string("data"),
        Some(_) => None,
    })
}

fn url_of<'a>(part: &Fields<'a>) -> Result<Option<&'a str>> {
    Ok(match part.get("image_url") {
        Some(serde_json::Value::Object(_)) => part.object("image_url")?.and_then(|url| url.string("url")),
        _ => part.string("image_url"),
    })
}

/// What a text says of the file: base64 behind `data:` or alone, or where it is.
fn source(field: &str, text: &str) -> Result<ImageSource> {
    match base64_of_picture(text) {
        Ok(base64) => Ok(ImageSource::Base64(base64.to_owned())),
        Err(PictureTextError::Address) => {
            PictureUrl::parse(text).map(ImageSource::Url).map_err(|error| refused(field, &error.to_string()))
        }
        Err(error) => Err(refused(field, &error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_are_in_base64_or_at_addresses() {
        for good in ["aGk=", "aGk", "data:image/png;base64,aGk=", "DATA:;BASE64,aGk=", "aG\nk="] {
            let image = RequestImage::of_text("images[3]", good, Author::Message);
            assert_eq!(
                (image.bytes() > 2, image.url(), image.decoded(9)),
                (true, Ok(None), Ok(b"hi".to_vec())),
                "{good}"
            );
        }
        let image = RequestImage::of_text("images[3]", "https://a.b/c.png", Author::Message);
        assert_eq!((image.bytes(), image.url()), (0, Ok(PictureUrl::parse("https://a.b/c.png").ok().as_ref())));
        assert!(!format!("{image:?}").contains("a.b"), "{image:?}");
        let [no_base64, no_data] = [PictureTextError::NotBase64Url, PictureTextError::Missing].map(|e| e.to_string());
        let (scheme, user) = (FetchError::Scheme.to_string(), FetchError::User.to_string());
        for (bad, why) in [
            ("file:///etc/passwd", scheme.as_str()),
            ("FILE:/etc/passwd", &scheme),
            ("ftp://a.b/c.png", &scheme),
            ("http://name:passwd@a.b/c.png", &user),
            ("data:image/png,abc", &no_base64),
            ("data:image/png;base64", &no_base64),
            ("data:image/png;base64,", &no_data),
            ("", &no_data),
        ] {
            let error = RequestImage::of_text("images[3]", bad, Author::Message).url().unwrap_err();
            assert_eq!((error.status, error.param.as_deref()), (StatusCode::BAD_REQUEST, Some("images[3]")));
            assert_eq!(error.message, format!("Invalid value for 'images[3]': {why}."));
            assert!(!error.message.contains("passwd") && !error.message.contains("a.b"), "{error}");
        }
    }

    #[test]
    fn only_a_want_of_memory_passes() {
        let image = RequestImage::of_text("images[0]", "http://a.b", Author::Message);
        let (full, slow) = (image.unfetched(FetchError::NoRoom), image.unfetched(FetchError::Slow(20)));
        assert_eq!((full.status, full.retry_after), (StatusCode::SERVICE_UNAVAILABLE, Some(FULL_SECONDS)));
        assert_eq!((slow.status, slow.retry_after), (StatusCode::BAD_REQUEST, None));
        assert_eq!((full.param, slow.param), (Some("images[0]".into()), Some("images[0]".into())));
    }
}
