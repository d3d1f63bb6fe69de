//! Why a picture is not fetched.

/// A reason, as a sentence without its full stop. None repeats anything of the URL or of the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FetchError {
    /// No host is named.
    #[error(
        "pictures are not fetched from addresses; send the file itself as a data: URL in base64, or start the server \
         with --image-urls and the host"
    )]
    Off,
    /// The URL has another scheme.
    #[error("pictures are fetched from http: and https: addresses only; send the file itself as a data: URL in base64")]
    Scheme,
    /// The text is no URL with a host.
    #[error("the address of the picture is not a valid URL with a host")]
    Malformed,
    /// The URL has a user or a password.
    #[error("the address of the picture has a user or a password, which are not sent; leave them out")]
    User,
    /// The host is not named.
    #[error("--image-urls of the server does not name the host and port of the picture")]
    Unnamed,
    /// The URL is of https, which this build does not have.
    #[error("this larder was built without TLS; build it with --features tls, or use an http: address")]
    NoTls,
    /// The host has no address.
    #[error("the host of the picture is not found")]
    Unresolved,
    /// The host leads into a network that is not public.
    #[error("the host of the picture has a private or reserved address; --image-urls can name such an address itself")]
    Private,
    /// No connection is made.
    #[error("the server of the picture cannot be reached")]
    Unreachable,
    /// There is no TLS, or a certificate that is not trusted.
    #[error("no TLS connection to the server of the picture can be made, or its certificate is not valid")]
    Handshake,
    /// The answer is none of HTTP.
    #[error("the server of the picture does not answer the request")]
    NoAnswer,
    /// There is no picture.
    #[error("the server of the picture answers with status {0}")]
    Status(u16),
    /// The redirects are too many.
    #[error("the address of the picture is redirected more than {0} times")]
    Redirects(usize),
    /// The redirect leads to what is not fetched.
    #[error("the address of the picture is redirected to one that is not fetched")]
    Redirected,
    /// The answer is compressed.
    #[error("the server of the picture answers in a compressed form, which was not asked for")]
    Compressed,
    /// The answer says that it is something else.
    #[error("the address leads to a page or another file, and not to a picture")]
    NoPicture,
    /// The answer ends too early.
    #[error("the answer with the picture breaks off")]
    Incomplete,
    /// The file is too large.
    #[error("the picture has more bytes than the {0} that a file may have")]
    TooLarge(usize),
    /// The files of a request are too large.
    #[error("the pictures of the request have more than {0} MiB together")]
    TooManyBytes(usize),
    /// The file is not there in time.
    #[error("the picture did not arrive within {0} s")]
    Slow(u64),
    /// Other requests have all of the memory for pictures.
    #[error("there is no memory for the picture beside those of other requests; ask again when fewer are under way")]
    NoRoom,
}
